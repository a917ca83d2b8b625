// Words in shared memory that one process advances and others wait for: first spinning, then asleep on a futex.
#pragma once

#include <atomic>
#include <cstdint>

#include "status.h"

namespace hvkeras {

// Ends all waiting of one process, from any thread. The first failure stays.
class AbortFlag {
 public:
  AbortFlag() = default;
  ~AbortFlag();
  AbortFlag(const AbortFlag&) = delete;
  AbortFlag& operator=(const AbortFlag&) = delete;

  void raise(const Status& failure) noexcept;
  bool raised() const { return failure_.load(std::memory_order_acquire) != nullptr; }
  // The failure; success, until it is raised.
  const Status& status() const;
  void check() const {  // throws Failure
    if (raised()) throw Failure(status());
  }

 private:
  std::atomic<const Status*> failure_{nullptr};  // flag and failure in one: who sees the one has the other
};

// How long a wait looks before it sleeps. The one that is waited for may need this very core, also where there are as
// many cores as ranks, as schedulers do not always spread ranks; so it is offered soon, which costs little where nobody
// takes it.
struct SpinPolicy {
  int spins = 200;   // looks at the word, each with a pause of the processor
  int yields = 500;  // then looks with the core offered to others in between
};

// A counter that wraps; it lies in memory that several processes map. Alone on its cache lines.
struct alignas(128) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  // Processes share it as bare memory, which begins as zeros, and futexes look at the value.
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

  uint32_t load() const { return value.load(std::memory_order_acquire); }
  bool reached(uint32_t target) const { return static_cast<int32_t>(load() - target) >= 0; }
  // Makes all that this thread wrote before visible to those that see the new value, and wakes sleepers.
  void advance_to(uint32_t target) {
    set(target);
    wake();
  }
  void set(uint32_t target) { value.store(target, std::memory_order_seq_cst); }
  void wake();
  // Returns once the value is at least `target`. Throws Failure when aborted.
  void wait(uint32_t target, const SpinPolicy& spin_policy, const AbortFlag& abort);
  // The same for at most `microseconds`, asleep at once if asked. Returns whether it was reached.
  bool wait_for(uint32_t target, int64_t microseconds, bool sleep, const AbortFlag& abort);
};

int64_t microseconds_now();

// Tells the processor that this thread only waits.
inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How long to look at a network before sleeping until it has something, which takes two changes of threads.
class Polling {
 public:
  static constexpr int64_t kMaxSleepMicros =
      20'000;  // microseconds, after which a sleeper looks whether it was aborted

  // With more ranks than cores, the core is offered to others instead.
  explicit Polling(bool oversubscribed) : oversubscribed_(oversubscribed) {}
  // Whether to look again at once; else it is time to sleep.
  bool keep_polling();

 private:
  bool oversubscribed_;
  int polls_ = 0;
  int64_t end_ = 0;
};

}  // namespace hvkeras
