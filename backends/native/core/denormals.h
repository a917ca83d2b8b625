// How the calling thread treats subnormal numbers, those closest to zero.
//
// TensorFlow has its threads take them for zero, which is faster; ours do not. Which of the two runs a collective is a
// matter of chance on each rank, so every one runs with subnormal numbers kept: else ranks would differ, in float16
// from 6e-5 down.
#pragma once

#include <cstdint>

namespace hvkeras {

class ScopedDenormals {
 public:
  ScopedDenormals() : before_(read()) { write(before_ & ~kFlush); }
  ~ScopedDenormals() { write(before_); }
  ScopedDenormals(const ScopedDenormals&) = delete;
  ScopedDenormals& operator=(const ScopedDenormals&) = delete;

  // For tests: has this thread take them for zero, as TensorFlow's do.
  static void flush() { write(read() | kFlush); }

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kFlush = 0x8040;  // of results, and of operands
  static Word read() { return __builtin_ia32_stmxcsr(); }
  static void write(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = (1u << 24) | (1u << 19);  // of all numbers, and of float16
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

  Word before_;
};

}  // namespace hvkeras
