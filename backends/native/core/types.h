// What the core computes with: element types (TensorFlow's numbers for them) and reductions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvkeras {

// TensorFlow's TF_DataType, so that no table stands between; the numbers are part of its stable C API.
enum class Type : int32_t {
  kFloat32 = 1,
  kFloat64 = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 5,
  kInt8 = 6,
  kComplex64 = 8,
  kInt64 = 9,
  kBool = 10,
  kBfloat16 = 14,
  kUint16 = 17,
  kComplex128 = 18,
  kFloat16 = 19,
  kUint32 = 22,
  kUint64 = 23,
};

enum class Reduction : int32_t { kSum, kMin, kMax, kProduct };

// Bytes of one element; 0 for a type that is not in the list above.
size_t size_of(Type type);

// A name for messages: "float32".
const char* name_of(Type type);

}  // namespace hvkeras
