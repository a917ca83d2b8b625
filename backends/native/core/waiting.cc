#include "waiting.h"

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

constexpr int64_t kLook = 20'000;  // microseconds after which a sleeper looks whether it was aborted
constexpr int64_t kPolled = 100;   // microseconds: a few times a short message's way from host to host
constexpr int kYields = 20;        // looks with the core offered to others in between

// The reason where there is no memory for the true one.
const std::string& no_memory() {
  static const std::string* const only = new std::string("there is no memory left");  // never destroyed
  return *only;
}
[[maybe_unused]] const bool is_made = (no_memory(), true);  // now, while there is memory

// Sleeps while the word is `seen`, at most so long. The word may lie in memory shared by processes.
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

std::string message_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return no_memory();
  return Failure(error.what()).what();
}

Abort::~Abort() {
  const std::string* const reason = reason_.load();
  if (reason != &no_memory()) delete reason;
}

void Abort::raise(const std::string& reason) noexcept {
  const std::string* made = &no_memory();
  try {
    made = new std::string(Failure(reason).what());
  } catch (const std::exception&) {
  }
  const std::string* none = nullptr;
  if (!reason_.compare_exchange_strong(none, made, std::memory_order_acq_rel) && made != &no_memory()) delete made;
}

const std::string& Abort::reason() const {
  static const std::string* const none = new std::string;  // never destroyed
  const std::string* const reason = reason_.load(std::memory_order_acquire);
  return reason == nullptr ? *none : *reason;
}

void Counter::wake() {
  if (sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Counter::await(uint32_t target, const Patience& patience, const Abort& abort) {
  for (int look = 0; look < patience.spins; ++look) {
    if (reached(target)) return;
    pause();
  }
  for (int look = 0; look < patience.yields; ++look) {
    if (reached(target)) return;
    sched_yield();
  }
  while (!await_for(target, kLook, true, abort)) {
  }
}

bool Counter::await_for(uint32_t target, int64_t microseconds, bool asleep, const Abort& abort) {
  abort.check();
  if (reached(target)) return true;
  const int64_t end = microseconds_now() + microseconds;
  int64_t left = microseconds;
  while (left > 0) {
    if (asleep) {
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = value.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(seen - target) < 0) sleep_while(value, seen, left < kLook ? left : kLook);
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
    } else {
      for (int look = 0; look < 64; ++look) pause();
    }
    if (reached(target)) return true;
    abort.check();
    left = end - microseconds_now();
  }
  return reached(target);
}

bool Polling::goes_on() {
  ++looks_;
  if (crowded_) {
    sched_yield();
    return looks_ < kYields;
  }
  if (looks_ == 1) end_ = microseconds_now() + kPolled;
  pause();
  return microseconds_now() < end_;
}

}  // namespace hvkeras
