// The reducers for these instructions; see reduce_kernels.h.
#define HVKERAS_INSTRUCTIONS avx512
#include "reduce_kernels.h"
