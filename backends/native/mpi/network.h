// What the engine asks of an MPI library, as a table of functions: so the engine itself needs none, and the one library
// that was compiled against an MPI is loaded only where a job is on several hosts.
//
// Functions return nullptr, or what went wrong: a text that lives until the thread's next call.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct HvkerasNetwork {
  // Starts to send bytes to a rank, or to receive them; gives a transfer, which `test` forgets once it is done.
  const char* (*send)(int rank, int tag, const void* data, size_t bytes, void** transfer);
  const char* (*receive)(int rank, int tag, void* data, size_t bytes, void** transfer);
  const char* (*test)(void* transfer, int* done);
  // Takes a message of this tag and size that has arrived, and says whence; the rank is -1 where there is none.
  const char* (*take)(int tag, void* message, size_t bytes, int* rank);
  // The largest tag.
  int tags;
};

}  // extern "C"
