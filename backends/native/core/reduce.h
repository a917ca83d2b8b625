// Elementwise reductions over the ranks' values, in rank order, so that the result does not depend on the rank that
// computes it.
#pragma once

#include "types.h"

namespace hvkeras {

// Reduces `ranks` arrays of `count` elements into `out`, which may be one of them. Floating-point inputs are multiplied
// by `prescale`, results by `postscale`. Half precision is accumulated in float32 and rounded once.
using Reducer = void (*)(void* out, const void* const* in, int ranks, size_t count, double prescale, double postscale);

// The fastest reducer on this processor; nullptr if the reduction is undefined (such as the minimum of complex
// numbers).
Reducer reducer_of(Type type, Reduction reduction);

// The instruction set that reducers use: "avx512", "avx2" or "plain".
const char* instruction_set();

// For tests: selects an instruction set. Returns false if the processor does not support it.
bool use_instruction_set(const char* name);

}  // namespace hvkeras
