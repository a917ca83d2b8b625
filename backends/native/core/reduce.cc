#include "reduce.h"

#include <atomic>
#include <cstring>

#include "quantize.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hvkeras {

namespace plain {
Reducer reducer_of(Type type, Reduction reduction);
Quantizer quantizer();
}  // namespace plain
namespace avx2 {
Reducer reducer_of(Type type, Reduction reduction);
Quantizer quantizer();
}  // namespace avx2
namespace avx512 {
Reducer reducer_of(Type type, Reduction reduction);
Quantizer quantizer();
}  // namespace avx512

namespace {

#if defined(__x86_64__)
// Queries the processor directly: __builtin_cpu_supports returns false for everything if compiler-rt is linked into a
// shared library (seen with Zig 0.16).
struct Processor {
  unsigned extensions = 0;  // CPUID leaf 7, EBX
  unsigned saved = 0;       // XCR0: the register state that the operating system saves

  Processor() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return;
    constexpr unsigned kHasXgetbv = 1u << 27;
    if ((c & kHasXgetbv) == 0) return;
    asm("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) extensions = b;
  }
  bool has(unsigned wanted, unsigned registers) const {
    return (extensions & wanted) == wanted && (saved & registers) == registers;
  }
};

constexpr unsigned kYmm = 0x6, kZmm = 0xe6;  // bits of `saved`
constexpr unsigned kAvx2 = 1u << 5;
constexpr unsigned kAvx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
#endif

struct InstructionSet {
  const char* name;
  bool (*supported)();
  Reducer (*reducer_of)(Type, Reduction);
  Quantizer (*quantizer)();
};

// Best first. NEON is part of every 64-bit ARM processor, so `plain` uses it there.
const InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
    {"avx512", [] { return Processor().has(kAvx512, kZmm); }, avx512::reducer_of, avx512::quantizer},
    {"avx2", [] { return Processor().has(kAvx2, kYmm); }, avx2::reducer_of, avx2::quantizer},
#endif
    {"plain", [] { return true; }, plain::reducer_of, plain::quantizer},
};

const InstructionSet* best_supported() {
  for (const InstructionSet& candidate : kInstructionSets) {
    if (candidate.supported()) return &candidate;
  }
  return nullptr;
}

std::atomic<const InstructionSet*>& current() {
  static std::atomic<const InstructionSet*> candidate{best_supported()};
  return candidate;
}

}  // namespace

Reducer reducer_of(Type type, Reduction reduction) { return current().load()->reducer_of(type, reduction); }

Quantizer quantizer() { return current().load()->quantizer(); }

const char* instruction_set() { return current().load()->name; }

bool use_instruction_set(const char* name) {
  for (const InstructionSet& candidate : kInstructionSets) {
    if (std::strcmp(candidate.name, name) == 0 && candidate.supported()) {
      current() = &candidate;
      return true;
    }
  }
  return false;
}

size_t size_of(Type type) {
  switch (type) {
    case Type::kUint8:
    case Type::kInt8:
    case Type::kBool:
      return 1;
    case Type::kInt16:
    case Type::kBfloat16:
    case Type::kUint16:
    case Type::kFloat16:
      return 2;
    case Type::kFloat32:
    case Type::kInt32:
    case Type::kUint32:
      return 4;
    case Type::kFloat64:
    case Type::kInt64:
    case Type::kComplex64:
    case Type::kUint64:
      return 8;
    case Type::kComplex128:
      return 16;
  }
  return 0;
}

const char* name_of(Type type) {
  switch (type) {
    case Type::kFloat32:
      return "float32";
    case Type::kFloat64:
      return "float64";
    case Type::kInt32:
      return "int32";
    case Type::kUint8:
      return "uint8";
    case Type::kInt16:
      return "int16";
    case Type::kInt8:
      return "int8";
    case Type::kComplex64:
      return "complex64";
    case Type::kInt64:
      return "int64";
    case Type::kBool:
      return "bool";
    case Type::kBfloat16:
      return "bfloat16";
    case Type::kUint16:
      return "uint16";
    case Type::kComplex128:
      return "complex128";
    case Type::kFloat16:
      return "float16";
    case Type::kUint32:
      return "uint32";
    case Type::kUint64:
      return "uint64";
  }
  return "an unknown type";
}

}  // namespace hvkeras
