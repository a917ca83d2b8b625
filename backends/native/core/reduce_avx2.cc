// The reducers for this instruction set; see reduce_kernels.h.
#define HVKERAS_INSTRUCTIONS avx2
#include "reduce_kernels.h"
