// Synchronization between processes through words in shared memory, which are waited for by spinning first, then on a
// futex.
#pragma once

#include <atomic>
#include <cstdint>

#include "status.h"

namespace hvkeras {

// Makes all waits of one process fail; raised from any thread. The first failure is kept.
class AbortFlag {
 public:
  AbortFlag() = default;
  ~AbortFlag();
  AbortFlag(const AbortFlag&) = delete;
  AbortFlag& operator=(const AbortFlag&) = delete;

  void raise(const Status& failure) noexcept;
  bool raised() const { return failure_.load(std::memory_order_acquire) != nullptr; }
  // The failure; success if it has not been raised.
  const Status& status() const;
  void check() const {  // throws Failure
    if (raised()) throw Failure(status());
  }

 private:
  std::atomic<const Status*> failure_{nullptr};  // flag and failure in one word
};

// How long a wait spins before it sleeps. The rank that it waits for may need this very core, even if there are as many
// cores as ranks, as schedulers do not always spread ranks. So it yields soon, which costs little if no other thread
// needs the core.
struct SpinPolicy {
  int spins = 200;   // checks with a pause instruction each
  int yields = 500;  // then checks with sched_yield() each
};

// A counter that wraps around, in memory that several processes map. It does not share cache lines with other data.
struct alignas(128) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  // It starts as zeroed shared memory, and futexes operate on the value.
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

  uint32_t load() const { return value.load(std::memory_order_acquire); }
  bool reached(uint32_t target) const { return static_cast<int32_t>(load() - target) >= 0; }
  // Publishes all previous writes of this thread to threads that see the new value, and wakes sleepers.
  void advance_to(uint32_t target) {
    set(target);
    wake();
  }
  void set(uint32_t target) { value.store(target, std::memory_order_seq_cst); }
  void wake();
  // Waits until the value is at least `target`. Throws Failure if the flag is raised.
  void wait(uint32_t target, const SpinPolicy& spin_policy, const AbortFlag& abort);
  // The same for at most `microseconds`, spinning or (with `sleep`) on the futex. Returns whether the target was
  // reached.
  bool wait_for(uint32_t target, int64_t microseconds, bool sleep, const AbortFlag& abort);
};

int64_t microseconds_now();

// Hint to the processor that this is a spin-wait loop.
inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How long to poll a network before sleeping, which costs two context switches.
class Polling {
 public:
  static constexpr int64_t kMaxSleepMicros = 20'000;  // microseconds, after which a sleeper checks the abort flag

  // With more ranks than cores, polls yield the core.
  explicit Polling(bool oversubscribed) : oversubscribed_(oversubscribed) {}
  // Whether to poll again; otherwise the caller should sleep.
  bool keep_polling();

 private:
  bool oversubscribed_;
  int polls_ = 0;
  int64_t end_ = 0;
};

}  // namespace hvkeras
