// Blocks of 8-bit numbers with a common scale, which take a quarter of the bytes of float32.
//
// A number is rounded up or down at random, in proportion to its distance, so that the expected value is exact (QSGD:
// D. Alistarh et al., 2017). What rounding has changed is returned, to be added to the next numbers (error feedback:
// F. Seide et al., 1-bit SGD, 2014; S. P. Karimireddy et al., Error feedback fixes SignSGD, 2019).
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvkeras {

constexpr size_t kScaledElements = 256;  // elements of a block

// A block is its scale, followed by its numbers.
constexpr size_t encoded_bytes(size_t count) {
  return count + (count + kScaledElements - 1) / kScaledElements * sizeof(float);
}

// The functions for one instruction set. Arrays begin with a block; only their last block may be shorter.
struct Quantizer {
  // Encodes x[i] * factor + errors[i] + the numbers of `blocks` other encoded arrays, and stores the rounding errors.
  // A block with an infinity or NaN becomes NaN, and its errors stay as they are.
  void (*encode)(char* out, const float* x, float* errors, size_t count, float factor, const char* const* others,
                 int other_count, uint32_t seed);
  void (*decode)(float* out, const char* in, size_t count, float factor);
};

// The fastest one on this processor.
Quantizer quantizer();

}  // namespace hvkeras
