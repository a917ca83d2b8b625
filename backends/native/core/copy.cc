#include "copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hvkeras {

namespace {

constexpr size_t kLine = 64;
constexpr size_t kRepMovsBytes = 2048;        // bytes from which glibc's std::memcpy may use `rep movsb`, see copy.h
constexpr size_t kMinTimedBytes = 16 * 1024;  // bandwidth dominates latency from here on
constexpr unsigned kTimingInterval = 64;      // sequences; the first two are timed, one with each method
constexpr double kMinSpeedup = 2.0;           // required of non-temporal stores, as they slow down reads

// Compiles to one load or store per std::memcpy, which also handles unaligned addresses.
void copy_line(char* to, const char* from) {
  using Register = long long __attribute__((vector_size(16)));
  Register one, two, three, four;
  static_assert(4 * sizeof one == kLine);
  std::memcpy(&one, from, sizeof one);
  std::memcpy(&two, from + sizeof one, sizeof two);
  std::memcpy(&three, from + 2 * sizeof one, sizeof three);
  std::memcpy(&four, from + 3 * sizeof one, sizeof four);
  std::memcpy(to, &one, sizeof one);
  std::memcpy(to + sizeof one, &two, sizeof two);
  std::memcpy(to + 2 * sizeof one, &three, sizeof three);
  std::memcpy(to + 3 * sizeof one, &four, sizeof four);
}

// Copies with non-temporal stores.
void copy_non_temporal(char* to, const char* from, size_t bytes) {
#if defined(__SSE2__)
  const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  size_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + done);
    auto* const target = reinterpret_cast<__m128i*>(to + done);
    const __m128i one = _mm_loadu_si128(source), two = _mm_loadu_si128(source + 1), three = _mm_loadu_si128(source + 2),
                  four = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, one);
    _mm_stream_si128(target + 1, two);
    _mm_stream_si128(target + 2, three);
    _mm_stream_si128(target + 3, four);
  }
  std::memcpy(to + done, from + done, bytes - done);
#else
  copy(to, from, bytes);
#endif
}

}  // namespace

void copy(void* out, const void* in, size_t bytes) {
  if (bytes < kRepMovsBytes) {
    std::memcpy(out, in, bytes);
    return;
  }
  char* const to = static_cast<char*>(out);
  const char* const from = static_cast<const char*>(in);
  for (size_t done = 0; done + kLine <= bytes; done += kLine) {
    copy_line(to + done, from + done);
    asm volatile("" ::: "memory");  // prevents the compiler from turning this loop into a call of memcpy
  }
  copy_line(to + bytes - kLine, from + bytes - kLine);  // the remainder, which overlaps the last full line
}

void Writer::write(void* out, const void* in, size_t bytes) {
  if (non_temporal_ && !is_short_ && bytes >= kRepMovsBytes) {
    copy_non_temporal(static_cast<char*>(out), static_cast<const char*>(in), bytes);
  } else {
    copy(out, in, bytes);
  }
}

void Writer::flush() {
#if defined(__SSE2__)
  if (non_temporal_) _mm_sfence();
#endif
}

void Writer::begin(size_t bytes) {
  is_short_ = bytes < kMinTimedBytes;
  if (is_short_) return;
  const unsigned index = sequence_count_++ % kTimingInterval;
  if (index > 1) return;
  non_temporal_ = index == 1;
  timed_bytes_ = bytes;
  start_ = Clock::now();
}

void Writer::end() {
  flush();
  is_short_ = false;
  if (timed_bytes_ == 0) return;
  const std::chrono::duration<double, std::nano> taken = Clock::now() - start_;
  const double time = taken.count() / static_cast<double>(timed_bytes_);
  timed_bytes_ = 0;
  if (non_temporal_) {
    non_temporal_ = time * kMinSpeedup < cached_ns_per_byte_;
  } else {
    cached_ns_per_byte_ = time;
  }
}

}  // namespace hvkeras
