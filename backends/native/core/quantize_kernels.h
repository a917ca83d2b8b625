// The functions of a Quantizer, compiled once for each instruction set like those in reduce_kernels.h.
#pragma once

#include <limits>

#include "quantize.h"
#include "reduce_kernels.h"

namespace hvkeras::HVKERAS_INSTRUCTIONS {

constexpr float kMost = 127.0f;      // the largest encoded number
constexpr float kTooSmall = 1e-30f;  // a block of smaller numbers is zero: the inverse of its scale would overflow
constexpr uint32_t kInfinity = 0x7f800000;  // the bits of the smallest float that is not finite

// A number in [1, 2), uniform and independent of those of other indices and seeds. The constants are those of xxHash32.
inline float random_from_1_to_2(uint32_t index, uint32_t seed) {
  uint32_t bits = (index + seed) * 0x9e3779b1u;
  bits = (bits ^ (bits >> 15)) * 0x85ebca77u;
  bits = (bits ^ (bits >> 13)) * 0xc2b2ae3du;
  return bits_to_float(0x3f800000u | (bits >> 9));
}

// `out` may begin where `x` does: each block is read before it is written.
inline void encode(char* out, const float* x, float* errors, size_t count, float factor, const char* const* others,
                   int other_count, uint32_t seed) {
  alignas(64) float values[kScaledElements];
  alignas(64) int8_t numbers[kScaledElements];
  for (size_t start = 0; start < count; start += kScaledElements) {
    const size_t length = std::min(kScaledElements, count - start), at = encoded_bytes(start);
    float* __restrict const error = errors + start;
    const float* const from = x + start;
    for (size_t i = 0; i < length; ++i) values[i] = from[i] * factor + error[i];
    for (int other = 0; other < other_count; ++other) {
      float scale;
      std::memcpy(&scale, others[other] + at, sizeof scale);
      const int8_t* const added = reinterpret_cast<const int8_t*>(others[other] + at + sizeof scale);
      for (size_t i = 0; i < length; ++i) values[i] += scale * static_cast<float>(added[i]);
    }
    uint32_t largest_bits = 0;
    for (size_t i = 0; i < length; ++i) largest_bits = std::max(largest_bits, float_to_bits(values[i]) & 0x7fffffffu);
    const float largest = bits_to_float(largest_bits);
    float scale = 0.0f;
    if (largest_bits >= kInfinity || largest < kTooSmall) {
      std::memset(numbers, 0, length);
      if (largest_bits >= kInfinity) {
        scale = std::numeric_limits<float>::quiet_NaN();
      } else {
        std::memcpy(error, values, length * sizeof(float));
      }
    } else {
      scale = largest / kMost;
      const float inverse = kMost / largest;
      const uint32_t first = static_cast<uint32_t>(start);
      for (size_t i = 0; i < length; ++i) {
        // Positive, so that truncation rounds down.
        const float shifted =
            values[i] * inverse + (kMost + random_from_1_to_2(first + static_cast<uint32_t>(i), seed));
        const int32_t number = std::min(static_cast<int32_t>(shifted) - 128, 127);
        numbers[i] = static_cast<int8_t>(number);
        error[i] = values[i] - scale * static_cast<float>(number);
      }
    }
    std::memcpy(out + at, &scale, sizeof scale);
    std::memcpy(out + at + sizeof scale, numbers, length);
  }
}

inline void decode(float* out, const char* in, size_t count, float factor) {
  for (size_t start = 0; start < count; start += kScaledElements) {
    const size_t length = std::min(kScaledElements, count - start), at = encoded_bytes(start);
    float scale;
    std::memcpy(&scale, in + at, sizeof scale);
    scale *= factor;
    const int8_t* const numbers = reinterpret_cast<const int8_t*>(in + at + sizeof scale);
    float* __restrict const to = out + start;
    for (size_t i = 0; i < length; ++i) to[i] = scale * static_cast<float>(numbers[i]);
  }
}

Quantizer quantizer() { return {encode, decode}; }

}  // namespace hvkeras::HVKERAS_INSTRUCTIONS
