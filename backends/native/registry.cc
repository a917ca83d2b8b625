// The engine's functions for Python, called through ctypes; see exported.h.
#include "registry.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "core/notifier.h"
#include "exported.h"
#include "ucx/exports.h"

namespace hvkeras {

namespace {

// Memory shared by the processes of a host.
class SharedMemory {
 public:
  SharedMemory(const std::string& name, size_t bytes, bool create) : bytes_(bytes) {
    const int file = shm_open(name.c_str(), create ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
    if (file < 0) fail("failed to open shared memory", name);
    // Allocates now: if /dev/shm is full, this returns an error, while a first access later would raise SIGBUS.
    const int error = create ? allocate(file, bytes) : 0;
    struct stat status{};
    const bool fits = error == 0 && fstat(file, &status) == 0 && static_cast<size_t>(status.st_size) == bytes;
    if (fits) base_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    const int reason = error != 0 ? error : errno;
    close(file);
    if (fits && base_ != MAP_FAILED) return;
    if (create) shm_unlink(name.c_str());
    errno = reason;
    fail(error == ENOSPC ? "/dev/shm is full (in a container: --shm-size)" : "failed to map shared memory", name);
  }
  ~SharedMemory() { munmap(base_, bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  void* base() const { return base_; }

 private:
  // In steps: when a signal interrupts a call, its allocation is undone and must be repeated.
  static int allocate(int file, size_t bytes) {
    constexpr size_t kStepBytes = 1024 * 1024;
    for (size_t start = 0; start < bytes;) {
      const size_t step = std::min(kStepBytes, bytes - start);
      const int error = posix_fallocate(file, static_cast<off_t>(start), static_cast<off_t>(step));
      if (error != 0 && error != EINTR) return error;
      if (error == 0) start += step;
    }
    return 0;
  }
  [[noreturn]] void fail(const std::string& what, const std::string& name) const {
    throw Failure(what + ": " + std::strerror(errno) + ". Received: name='" + name +
                  "', bytes=" + std::to_string(bytes_));
  }

  size_t bytes_;
  void* base_ = MAP_FAILED;
};

// The path of the named pipe that belongs to a shared memory.
std::string notifier_path(const std::string& name) { return "/dev/shm" + name + ".notifier"; }

// An engine with its memory. The order of members matters: the engine is destroyed before its memory.
struct Group {
  std::unique_ptr<Notifier> notifier;  // only if the group spans several hosts
  SharedMemory memory;
  Engine engine;

  Group(const std::string& name, bool create, Engine::Shape shape)
      : notifier(shape.placement.hosts() > 1 ? std::make_unique<Notifier>(notifier_path(name), create) : nullptr),
        memory(name,
               Engine::bytes(static_cast<int>(shape.global_ranks.size()), shape.slot_bytes, shape.placement.hosts()),
               create),
        engine(memory.base(), with_notifier(std::move(shape))) {}

 private:
  Engine::Shape with_notifier(Engine::Shape shape) const {
    if (notifier) shape.notifier = notifier->descriptor();
    return shape;
  }
};

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Group>> groups;
  std::atomic<bool> is_used{false};         // whether this process has ever opened a group
  std::atomic<bool> is_forked_copy{false};  // in a forked child, which has none of the threads
};

Registry& registry() {
  static Registry* const only = [] {
    auto* const created = new Registry;  // never destroyed: threads may outlive the end of main()
    pthread_atfork(nullptr, nullptr, [] { registry().is_forked_copy = registry().is_used.load(); });
    return created;
  }();
  return *only;
}

void require_not_forked() {
  if (registry().is_forked_copy) throw Failure("a collective must run in the rank's process, not in a forked child");
}

// The engine's parameters for a group member: `ranks` are the group's global ranks, `hosts` the host of each.
Engine::Shape make_shape(int64_t group, int rank, const std::vector<int>& ranks, const std::vector<int>& hosts) {
  Engine::Shape shape;
  shape.placement = make_placement(rank, hosts);
  shape.slot_bytes = Channel::slot_bytes_for(static_cast<int>(shape.placement.max_ranks_per_host()));
  const std::vector<std::vector<int>>& ranks_on = shape.placement.ranks_on;
  for (const int member : ranks_on[static_cast<size_t>(shape.placement.host)]) {
    if (member < rank) ++shape.rank;
    shape.global_ranks.push_back(ranks[static_cast<size_t>(member)]);
  }
  if (shape.placement.hosts() > 1 && shape.rank == 0) shape.link = ucx::take_link(group);
  return shape;
}

// Closes a group that has been removed from the registry. A thread inside one of its collectives may hold the last
// reference, and wait for ranks that never arrive. So the engine is closed here, and not by the last owner, which may
// be that thread.
void close_group(std::shared_ptr<Group> group, const Status& failure) {
  if (!group) return;
  // This may be called from the callback of a collective that the worker thread ran.
  if (group->engine.is_worker_thread()) {
    group->engine.abort(failure);
    auto* const kept = new std::shared_ptr<Group>(std::move(group));  // leaked if no thread can be started
    std::thread([kept, failure] {
      pthread_setname_np(pthread_self(), "hvkeras-closing");
      (*kept)->engine.close(failure);
      delete kept;
    }).detach();
  } else {
    group->engine.close(failure);
  }
}

}  // namespace

std::shared_ptr<Engine> engine_of(int64_t group) {
  require_not_forked();
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.groups.find(group);
  if (found == all.groups.end())
    throw Failure(
        "this graph's collectives need the job in which it was traced to be running. HINT: call hvd.init() first, and "
        "hvd.shutdown() last");
  return std::shared_ptr<Engine>(found->second, &found->second->engine);
}

}  // namespace hvkeras

extern "C" {

// `rank` is this process's index in `global_ranks`, and `hosts` has the host number of each of them. The ranks of one
// host open the same memory, which the first of them creates. If there are several hosts, that rank has connected its
// link before. `costs` has the latency, the time per message and the time per byte between hosts (Costs).
EXPORTED ExportedStatus hvkeras_open_group(int64_t group, const char* name, int create, int rank, int ranks,
                                           const int32_t* global_ranks, const int32_t* hosts, int oversubscribed,
                                           const double* costs) {
  using namespace hvkeras;
  return guarded([&] {
    require_not_forked();
    Engine::Shape shape = make_shape(group, rank, std::vector<int>(global_ranks, global_ranks + ranks),
                                     std::vector<int>(hosts, hosts + ranks));
    shape.oversubscribed = oversubscribed != 0;
    shape.costs = {costs[0], costs[1], costs[2]};
    auto opened = std::make_shared<Group>(name, create != 0, std::move(shape));
    {
      const std::lock_guard<std::mutex> lock(registry().mutex);
      std::swap(registry().groups[group], opened);
      registry().is_used = true;
    }
    // After the swap, this is the previous engine of the group, if there is one.
    close_group(std::move(opened), {Code::kFailed, "the engine was restarted"});
  });
}

EXPORTED ExportedStatus hvkeras_unlink(const char* name) {
  return hvkeras::guarded([&] {
    shm_unlink(name);
    unlink(hvkeras::notifier_path(name).c_str());
  });
}

// Collectives of the group that are in flight fail with this reason.
EXPORTED ExportedStatus hvkeras_close_group(int64_t group, const char* reason) {
  using namespace hvkeras;
  return guarded([&] {
    std::shared_ptr<Group> closing;
    {
      const std::lock_guard<std::mutex> lock(registry().mutex);
      const auto found = registry().groups.find(group);
      if (found == registry().groups.end()) return;
      closing = std::move(found->second);
      registry().groups.erase(found);
    }
    close_group(std::move(closing), {Code::kFailed, reason});
  });
}

// Another rank has failed: all collectives of this process, current and future, fail with this reason.
EXPORTED ExportedStatus hvkeras_abort(const char* reason) {
  using namespace hvkeras;
  return guarded([&] {
    std::vector<std::shared_ptr<Group>> all;
    {
      const std::lock_guard<std::mutex> lock(registry().mutex);
      for (const auto& [number, group] : registry().groups) all.push_back(group);
    }
    for (const auto& group : all) group->engine.abort({Code::kAborted, reason});
  });
}

// Whether collectives of this process fail because another rank has failed or its host is unreachable. TensorFlow does
// not pass our codes through, and XLA and Python functions in graphs pass no code at all, so callers check this after
// an error.
EXPORTED bool hvkeras_peer_has_failed() {
  using namespace hvkeras;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return std::any_of(registry().groups.begin(), registry().groups.end(), [](const auto& one) {
    const Code code = one.second->engine.status().code();
    return code == Code::kAborted || code == Code::kPeerFailed;
  });
}

// Copies the rounding errors of a compressed allreduce, if this rank has as many as `count`. Returns whether it does.
// Not while the allreduce runs.
EXPORTED bool hvkeras_read_errors(int64_t group, const char* key, float* errors, int64_t count) {
  using namespace hvkeras;
  bool has_errors = false;
  guarded([&] {
    const std::shared_ptr<ErrorFeedback> found = engine_of(group)->feedback(key_of(key));
    has_errors = found->errors.size() == static_cast<size_t>(count);
    if (has_errors) std::copy(found->errors.begin(), found->errors.end(), errors);
  });
  return has_errors;
}

// Replaces the rounding errors of a compressed allreduce. Returns whether the group exists. Not while the allreduce
// runs, except without errors, which frees them.
EXPORTED bool hvkeras_write_errors(int64_t group, const char* key, const float* errors, int64_t count) {
  using namespace hvkeras;
  return guarded([&] {
           const std::shared_ptr<Engine> engine = engine_of(group);
           if (count == 0) return engine->forget_feedback(key_of(key));
           engine->feedback(key_of(key))->errors.assign(errors, errors + count);
         }).code == static_cast<int32_t>(Code::kOk);
}

EXPORTED const char* hvkeras_instructions() { return hvkeras::instruction_set(); }

}  // extern "C"
