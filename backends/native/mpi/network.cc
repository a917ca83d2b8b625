// The engine's network over MPI; the only file that includes mpi.h.
//
// All ranks open it at once, and get a communicator of their own. One thread looks after what has been sent: MPI moves
// data on only while somebody calls it.
#include "network.h"

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>

// Which MPI this is compiled for. Python reads it in the file before it loads that: another MPI numbers its types
// differently, and must not even come into the process.
#define HVKERAS_TEXT_OF(number) #number
#define HVKERAS_TEXT(number) HVKERAS_TEXT_OF(number)
#if defined(I_MPI_NUMVERSION)
#define HVKERAS_MPI "Intel MPI " HVKERAS_TEXT(I_MPI_NUMVERSION)
#elif defined(OMPI_MAJOR_VERSION)
#define HVKERAS_MPI                                                                                   \
  "Open MPI " HVKERAS_TEXT(OMPI_MAJOR_VERSION) "." HVKERAS_TEXT(OMPI_MINOR_VERSION) "." HVKERAS_TEXT( \
      OMPI_RELEASE_VERSION)
#elif defined(MPICH_VERSION)
#define HVKERAS_MPI "MPICH " MPICH_VERSION
#else
#define HVKERAS_MPI "an unknown MPI"
#endif

namespace {

constexpr std::chrono::milliseconds kLook{2};  // between two looks at what has been sent

struct State {
  std::shared_mutex open;  // held by every call into MPI, so that closing waits for them
  bool is_open = false;
  MPI_Comm communicator = MPI_COMM_NULL;
  std::thread progress;
  std::atomic<bool> closing{false};
  HvkerasNetwork table{};
};

State& state() {
  static State* const only = new State;  // never destroyed: threads may outlive the end of main()
  return *only;
}

thread_local std::string last_error;

const char* failed(const std::string& what) {
  last_error = what;
  return last_error.c_str();
}

// Says what MPI's code means, or nullptr for success.
const char* explained(int code, const char* doing) {
  if (code == MPI_SUCCESS) return nullptr;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return failed(std::string("MPI cannot ") + doing + ": " + std::string(text, static_cast<size_t>(length)));
}

// Runs a body while MPI is there.
template <typename Body>
const char* with_mpi(Body&& body) {
  const std::shared_lock<std::shared_mutex> lock(state().open);
  return state().is_open ? body() : failed("MPI has been left");
}

template <typename Start>
const char* begin(size_t bytes, void** transfer, const char* doing, Start&& start) {
  if (bytes > INT_MAX) return failed("a single message is too long for MPI");
  return with_mpi([&] {
    auto* const request = new MPI_Request;
    const char* const error = explained(start(static_cast<int>(bytes), request), doing);
    if (error != nullptr) delete request;
    *transfer = request;
    return error;
  });
}

const char* send(int rank, int tag, const void* data, size_t bytes, void** transfer) {
  return begin(bytes, transfer, "send", [&](int count, MPI_Request* request) {
    return MPI_Isend(data, count, MPI_BYTE, rank, tag, state().communicator, request);
  });
}

const char* receive(int rank, int tag, void* data, size_t bytes, void** transfer) {
  return begin(bytes, transfer, "receive", [&](int count, MPI_Request* request) {
    return MPI_Irecv(data, count, MPI_BYTE, rank, tag, state().communicator, request);
  });
}

const char* test(void* transfer, int* done) {
  return with_mpi([&] {
    auto* const request = static_cast<MPI_Request*>(transfer);
    *done = 0;
    const char* const error = explained(MPI_Test(request, done, MPI_STATUS_IGNORE), "move data");
    if (error != nullptr || *done != 0) delete request;
    return error;
  });
}

// The message is there as a whole, or so close behind its beginning that waiting for it is no waiting for its sender.
const char* take(int tag, void* message, size_t bytes, int* rank) {
  return with_mpi([&]() -> const char* {
    int there = 0;
    MPI_Status status;
    *rank = -1;
    if (const char* error = explained(MPI_Iprobe(MPI_ANY_SOURCE, tag, state().communicator, &there, &status), "look"))
      return error;
    if (there == 0) return nullptr;
    *rank = status.MPI_SOURCE;
    return explained(
        MPI_Recv(message, static_cast<int>(bytes), MPI_BYTE, *rank, tag, state().communicator, MPI_STATUS_IGNORE),
        "receive a message");
  });
}

// Lets MPI move on what nobody waits for: a message's last bytes may still be in this process when all is done here.
void look_after() {
  while (!state().closing.load()) {
    with_mpi([]() -> const char* {
      int there = 0;
      MPI_Iprobe(MPI_ANY_SOURCE, state().table.tags, state().communicator, &there, MPI_STATUS_IGNORE);
      return nullptr;
    });
    std::this_thread::sleep_for(kLook);
  }
}

// A communicator of our own, made by all ranks at once, with a deadline.
const char* duplicate_world(double timeout, MPI_Comm* made) {
  MPI_Request request;
  if (const char* error = explained(MPI_Comm_idup(MPI_COMM_WORLD, made, &request), "make a communicator")) return error;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
  for (int done = 0;;) {
    if (const char* error = explained(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "make a communicator"))
      return error;
    if (done != 0) return nullptr;
    if (std::chrono::steady_clock::now() > end) return failed("the other ranks have not joined over MPI in time");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

const char* open(int rank, int size, double timeout) {
  State& all = state();
  const std::unique_lock<std::shared_mutex> lock(all.open);
  if (all.is_open) return nullptr;
  int started = 0, ended = 0, threads = 0, own_rank = 0, own_size = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&ended);
  if (started == 0 || ended != 0) return failed("MPI is not running");
  MPI_Query_thread(&threads);
  if (threads != MPI_THREAD_MULTIPLE)
    return failed("MPI was started without MPI_THREAD_MULTIPLE, by a program or package that came first");
  MPI_Comm_rank(MPI_COMM_WORLD, &own_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &own_size);
  if (own_rank != rank || own_size != size)
    return failed("MPI counts this process as rank " + std::to_string(own_rank) + " of " + std::to_string(own_size) +
                  ", and the launcher as " + std::to_string(rank) + " of " + std::to_string(size));
  if (const char* error = duplicate_world(timeout, &all.communicator)) return error;
  MPI_Comm_set_errhandler(all.communicator, MPI_ERRORS_RETURN);
  int* most = nullptr;
  int there = 0;
  MPI_Comm_get_attr(all.communicator, MPI_TAG_UB, &most, &there);
  all.table = {send, receive, test, take, there != 0 ? *most : 32767};
  all.is_open = true;
  all.closing = false;
  all.progress = std::thread(look_after);
  return nullptr;
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED extern const char hvkeras_mpi_build[];
const char hvkeras_mpi_build[] = "hvkeras is built for " HVKERAS_MPI;

// Joins the ranks of MPI's world, which all call this; MPI runs, and has as many ranks, numbered like these.
EXPORTED const char* hvkeras_mpi_open(int rank, int size, double timeout, const HvkerasNetwork** network) {
  const char* const error = open(rank, size, timeout);
  *network = &state().table;
  return error;
}

// Ends all use of MPI, so that it may be finalised; what still comes is an error.
EXPORTED void hvkeras_mpi_close() {
  State& all = state();
  all.closing = true;
  if (all.progress.joinable()) all.progress.join();
  const std::unique_lock<std::shared_mutex> lock(all.open);
  all.is_open = false;
}

}  // extern "C"
