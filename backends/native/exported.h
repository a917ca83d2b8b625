// Shared by the functions that Python calls through ctypes, which cannot handle exceptions.
#pragma once

#include "core/status.h"

#define EXPORTED __attribute__((visibility("default")))

// The result of a function: a hvkeras::Code, and a message that is valid until the thread's next call.
struct ExportedStatus {
  int32_t code;
  const char* text;
};

namespace hvkeras {

// Calls `body`, and converts exceptions to a status.
template <typename Body>
ExportedStatus guarded(Body&& body) {
  thread_local Status last;
  last = Status();
  try {
    body();
  } catch (const std::exception& error) {
    last = status_of(error);
  }
  return {static_cast<int32_t>(last.code()), last.text()};
}

}  // namespace hvkeras
