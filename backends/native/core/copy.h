// Copies of tensors into shared memory and out of it.
#pragma once

#include <chrono>
#include <cstddef>

namespace hvkeras {

// Copies between memories that do not overlap. Not std::memcpy, in which glibc leaves 2 KiB and more to the processor's
// own `rep movsb`: on AMD's Zen 3 that is 15 times slower where the target does not begin at a cache line, as parts of
// buckets may not (measured; also https://lunnova.dev/articles/ryzen-slow-short-rep-mov).
void copy(void* out, const void* in, size_t bytes);

// Writes what other cores are to read, through the caches or past them, whichever is faster where the ranks run now.
//
// Cores that share a cache are best served by it. Others hold the lines that they read before, and taking those back
// one by one takes four times as long as writing past all caches. Which cores share a cache may change while a job
// runs, and virtual machines do not tell: so both ways are timed now and then.
class Writer {
 public:
  // Copies; others may read it after `flush`.
  void write(void* out, const void* in, size_t bytes);
  // Before others are told that it is written.
  void flush();
  // Before and after writes of so many bytes in all that nothing else comes between; `end` calls `flush`.
  void begin(size_t bytes);
  void end();

 private:
  using Clock = std::chrono::steady_clock;

  bool non_temporal_ = false;
  bool is_short_ = false;     // whether these are so few bytes that they go through the caches anyway
  unsigned write_count_ = 0;  // of those that are large enough to time
  size_t timed_bytes_ = 0;    // bytes that are being written, and timed; else 0
  Clock::time_point start_;
  double cached_ns_per_byte_ = 0.0;  // nanoseconds a byte, the last time, through the caches
};

}  // namespace hvkeras
