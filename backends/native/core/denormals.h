// The calling thread's handling of subnormal numbers (denormals).
//
// TensorFlow's threads flush them to zero, which is faster; the engine's worker threads do not. Which thread runs a
// collective varies from rank to rank and run to run. So collectives always run with subnormal numbers enabled;
// otherwise ranks would differ, for float16 from 6e-5 down.
#pragma once

#include <cstdint>

namespace hvkeras {

class ScopedDenormals {
 public:
  ScopedDenormals() : saved_(read()) { write(saved_ & ~kFlush); }
  ~ScopedDenormals() { write(saved_); }
  ScopedDenormals(const ScopedDenormals&) = delete;
  ScopedDenormals& operator=(const ScopedDenormals&) = delete;

  // For tests: makes this thread flush them to zero, as TensorFlow's threads do.
  static void flush_to_zero() { write(read() | kFlush); }

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kFlush = 0x8040;  // MXCSR: FTZ (results) and DAZ (operands)
  static Word read() { return __builtin_ia32_stmxcsr(); }
  static void write(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = (1u << 24) | (1u << 19);  // FPCR: FZ (float32, float64) and FZ16 (float16)
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kFlush = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif

  Word saved_;
};

}  // namespace hvkeras
