#include "synchronization.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <new>

namespace hvkeras {

namespace {

constexpr int64_t kAbortCheckMicros = 20'000;  // microseconds after which a sleeper checks the abort flag
constexpr int64_t kPollMicros = 100;           // microseconds: a few times the latency of a short message between hosts
constexpr int kMaxYields = 20;                 // polls, with a yield after each

// Sleeps while the word equals `seen`, at most this long. The word may be in memory shared between processes.
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen, int64_t microseconds) {
  timespec limit{static_cast<time_t>(microseconds / 1'000'000), static_cast<long>(microseconds % 1'000'000) * 1'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

}  // namespace

int64_t microseconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000LL + now.tv_nsec / 1'000;
}

AbortFlag::~AbortFlag() {
  const Status* const failure = failure_.load();
  if (failure != &Status::out_of_memory()) delete failure;
}

void AbortFlag::raise(const Status& failure) noexcept {
  const Status* made = new (std::nothrow) Status(failure);
  if (made == nullptr) made = &Status::out_of_memory();
  const Status* none = nullptr;
  if (!failure_.compare_exchange_strong(none, made, std::memory_order_acq_rel) && made != &Status::out_of_memory())
    delete made;
}

const Status& AbortFlag::status() const {
  static const Status* const success = new Status;  // never destroyed
  const Status* const failure = failure_.load(std::memory_order_acquire);
  return failure == nullptr ? *success : *failure;
}

void Counter::wake() {
  if (sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Counter::wait(uint32_t target, const SpinPolicy& spin_policy, const AbortFlag& abort) {
  for (int attempt = 0; attempt < spin_policy.spins; ++attempt) {
    if (reached(target)) return;
    pause();
  }
  for (int attempt = 0; attempt < spin_policy.yields; ++attempt) {
    if (reached(target)) return;
    sched_yield();
  }
  while (!wait_for(target, kAbortCheckMicros, true, abort)) {
  }
}

bool Counter::wait_for(uint32_t target, int64_t microseconds, bool sleep, const AbortFlag& abort) {
  abort.check();
  if (reached(target)) return true;
  const int64_t end = microseconds_now() + microseconds;
  int64_t left = microseconds;
  while (left > 0) {
    if (sleep) {
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = value.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(seen - target) < 0)
        sleep_while(value, seen, left < kAbortCheckMicros ? left : kAbortCheckMicros);
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
    } else {
      for (int attempt = 0; attempt < 64; ++attempt) pause();
    }
    if (reached(target)) return true;
    abort.check();
    left = end - microseconds_now();
  }
  return reached(target);
}

bool Polling::keep_polling() {
  ++polls_;
  if (oversubscribed_) {
    sched_yield();
    return polls_ < kMaxYields;
  }
  if (polls_ == 1) end_ = microseconds_now() + kPollMicros;
  pause();
  return microseconds_now() < end_;
}

}  // namespace hvkeras
