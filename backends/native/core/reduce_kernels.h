// The reducers, compiled once for each instruction set: define HVKERAS_INSTRUCTIONS as the namespace first. The
// compiler vectorizes them. Contraction to fused multiply-adds is off, so that all processors round alike.
#pragma once

#include <algorithm>
#include <complex>
#include <cstring>
#include <type_traits>

#include "reduce.h"

namespace hvkeras::HVKERAS_INSTRUCTIONS {

struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};
struct Bool {
  uint8_t value;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// float16 has 5 exponent bits and 10 mantissa bits. Shifted into the position of float32, its exponent is too small by
// 112. A multiplication corrects this, also for subnormal numbers. Infinities and NaNs then need an exponent of all
// ones.
inline float to_float(Float16 value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t scaled = float_to_bits(bits_to_float(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return bits_to_float(scaled | special | sign);
}
// Rounds to nearest, ties to even, as in IEEE 754.
inline Float16 to_float16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: the exponent is reduced by 112, and half a unit in the last place is added, less the bit that
  // decides ties.
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 shifts the mantissa into position, and the processor rounds.
  const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t rounded = magnitude >= 0x477ff000u ? special : finite;
  return Float16{static_cast<uint16_t>(sign | rounded)};
}
inline float to_float(Bfloat16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }
inline Bfloat16 to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return Bfloat16{static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

// The type in which T is computed, and conversions to and from it.
template <typename T>
struct Compute {
  using Number = T;
  static Number load(T value) { return value; }
  static T store(Number value) { return value; }
};
template <>
struct Compute<Float16> {
  using Number = float;
  static float load(Float16 value) { return to_float(value); }
  static Float16 store(float value) { return to_float16(value); }
};
template <>
struct Compute<Bfloat16> {
  using Number = float;
  static float load(Bfloat16 value) { return to_float(value); }
  static Bfloat16 store(float value) { return to_bfloat16(value); }
};

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

template <typename T>
T scale(T value, double factor) {
  if constexpr (std::is_floating_point_v<T>) {
    return value * static_cast<T>(factor);
  } else if constexpr (IsComplex<T>::value) {
    return value * static_cast<typename T::value_type>(factor);
  } else {
    return value;
  }
}

template <Reduction reduction, typename T>
T combine(T one, T other) {
  if constexpr (reduction == Reduction::kSum || reduction == Reduction::kProduct) {
    if constexpr (std::is_integral_v<T>) {  // wraps on overflow, which is defined only for unsigned integers
      using Unsigned = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;
      const Unsigned left = static_cast<Unsigned>(one), right = static_cast<Unsigned>(other);
      return static_cast<T>(reduction == Reduction::kSum ? left + right : left * right);
    } else {
      return reduction == Reduction::kSum ? one + other : one * other;
    }
  } else if constexpr (std::is_floating_point_v<T>) {  // a NaN of any rank is the result, as with NumPy's minimum
    const bool first = reduction == Reduction::kMin ? one < other : one > other;
    return (first || one != one) ? one : other;
  } else {
    return reduction == Reduction::kMin ? std::min(one, other) : std::max(one, other);
  }
}
// For bool, a sum is "any" and a product is "all".
template <Reduction reduction>
Bool combine(Bool one, Bool other) {
  const bool any = reduction == Reduction::kSum || reduction == Reduction::kMax;
  return Bool{static_cast<uint8_t>(any ? one.value | other.value : one.value & other.value)};
}

constexpr size_t kBlock = 1024;  // elements that are reduced at a time, which fit into the L1 cache

template <typename T, Reduction reduction>
void reduce(void* out, const void* const* in, int ranks, size_t count, double prescale, double postscale) {
  using Number = typename Compute<T>::Number;
  T* const result = static_cast<T*>(out);
  if (ranks == 2) {  // the most frequent case, without an intermediate buffer
    const T* const one = static_cast<const T*>(in[0]);
    const T* const other = static_cast<const T*>(in[1]);
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (size_t i = 0; i < count; ++i) {
      result[i] = Compute<T>::store(scale(
          combine<reduction>(scale(Compute<T>::load(one[i]), prescale), scale(Compute<T>::load(other[i]), prescale)),
          postscale));
    }
    return;
  }
  Number sums[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t length = std::min(kBlock, count - start);
    const T* const first = static_cast<const T*>(in[0]) + start;
    for (size_t i = 0; i < length; ++i) sums[i] = scale(Compute<T>::load(first[i]), prescale);
    for (int rank = 1; rank < ranks; ++rank) {
      const T* const next = static_cast<const T*>(in[rank]) + start;
      for (size_t i = 0; i < length; ++i)
        sums[i] = combine<reduction>(sums[i], scale(Compute<T>::load(next[i]), prescale));
    }
    for (size_t i = 0; i < length; ++i) result[start + i] = Compute<T>::store(scale(sums[i], postscale));
  }
}

// A sum of complex numbers, also with real factors, is a sum of their real and imaginary parts, which all compilers
// vectorize.
template <typename T>
void sum_complex(void* out, const void* const* in, int ranks, size_t count, double prescale, double postscale) {
  reduce<typename T::value_type, Reduction::kSum>(out, in, ranks, 2 * count, prescale, postscale);
}

template <typename T>
Reducer reducer_for(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      if constexpr (IsComplex<T>::value) return sum_complex<T>;
      return reduce<T, Reduction::kSum>;
    case Reduction::kProduct:
      return reduce<T, Reduction::kProduct>;
    case Reduction::kMin:
      if constexpr (!IsComplex<T>::value) return reduce<T, Reduction::kMin>;
      return nullptr;
    case Reduction::kMax:
      if constexpr (!IsComplex<T>::value) return reduce<T, Reduction::kMax>;
      return nullptr;
  }
  return nullptr;
}

Reducer reducer_of(Type type, Reduction reduction) {
  switch (type) {
    case Type::kFloat32:
      return reducer_for<float>(reduction);
    case Type::kFloat64:
      return reducer_for<double>(reduction);
    case Type::kInt32:
      return reducer_for<int32_t>(reduction);
    case Type::kUint8:
      return reducer_for<uint8_t>(reduction);
    case Type::kInt16:
      return reducer_for<int16_t>(reduction);
    case Type::kInt8:
      return reducer_for<int8_t>(reduction);
    case Type::kComplex64:
      return reducer_for<std::complex<float>>(reduction);
    case Type::kInt64:
      return reducer_for<int64_t>(reduction);
    case Type::kBool:
      return reducer_for<Bool>(reduction);
    case Type::kBfloat16:
      return reducer_for<Bfloat16>(reduction);
    case Type::kUint16:
      return reducer_for<uint16_t>(reduction);
    case Type::kComplex128:
      return reducer_for<std::complex<double>>(reduction);
    case Type::kFloat16:
      return reducer_for<Float16>(reduction);
    case Type::kUint32:
      return reducer_for<uint32_t>(reduction);
    case Type::kUint64:
      return reducer_for<uint64_t>(reduction);
  }
  return nullptr;
}

}  // namespace hvkeras::HVKERAS_INSTRUCTIONS
