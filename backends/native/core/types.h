// Element types (with TensorFlow's numbers) and reductions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvkeras {

// The values of TensorFlow's TF_DataType, which are part of its stable C API.
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

// Bytes of one element; 0 for types that are not listed above.
size_t size_of(Type type);

// The name of a type for messages, such as "float32".
const char* name_of(Type type);

}  // namespace hvkeras
