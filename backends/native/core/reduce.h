// Elementwise reductions over the ranks' values, in rank order, so that a result does not depend on who computes it.
#pragma once

#include "types.h"

namespace hvkeras {

// Reduces `ranks` arrays of `count` elements into `out`, which may be one of them.
// Floating-point inputs are multiplied by `before`, results by `after`; half precisions are summed in float32 and
// rounded once.
using Reducer = void (*)(void* out, const void* const* in, int ranks, size_t count, double prescale, double postscale);

// The reducer for this processor; nullptr where the reduction means nothing (the smaller of two complex numbers).
Reducer reducer_of(Type type, Reduction reduction);

// The instructions that reducers use: "avx512", "avx2" or "plain".
const char* instruction_set();

// For tests: use these instructions, if the processor has them. Returns whether it has.
bool use_instruction_set(const char* name);

}  // namespace hvkeras
