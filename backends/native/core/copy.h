// Copies of tensors into and out of shared memory.
#pragma once

#include <chrono>
#include <cstddef>

namespace hvkeras {

// Copies between buffers that do not overlap. std::memcpy is not used, as glibc copies 2 KiB and more with `rep movsb`.
// On AMD Zen 3 that is 15 times slower if the target does not start on a cache line, as parts of buckets may not
// (measured; see also https://lunnova.dev/articles/ryzen-slow-short-rep-mov).
void copy(void* out, const void* in, size_t bytes);

// Writes data that other cores will read, with regular or non-temporal stores, whichever is faster for the current
// placement of ranks.
//
// Between cores that share a cache, regular stores are the best. Other cores still hold the lines that they read
// before, and invalidating those one by one takes four times as long as non-temporal stores. Which cores share a cache
// may change while a job runs, and virtual machines do not expose it. So both methods are timed periodically.
class Writer {
 public:
  // Copies. Other ranks may read it after `flush`.
  void write(void* out, const void* in, size_t bytes);
  // Makes previous writes visible; call before signaling other ranks.
  void flush();
  // Call before and after a sequence of writes of `bytes` in all, without other work between them; `end` calls `flush`.
  void begin(size_t bytes);
  void end();

 private:
  using Clock = std::chrono::steady_clock;

  bool non_temporal_ = false;
  bool is_short_ = false;        // whether the current sequence is so short that it always uses regular stores
  unsigned sequence_count_ = 0;  // of the sequences that are long enough to be timed
  size_t timed_bytes_ = 0;       // bytes of the sequence that is being timed, or 0
  Clock::time_point start_;
  double cached_ns_per_byte_ = 0.0;  // of the last timed sequence with regular stores
};

}  // namespace hvkeras
