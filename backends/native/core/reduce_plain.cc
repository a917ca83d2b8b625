// The reducers for these instructions; see reduce_kernels.h.
#define HVKERAS_INSTRUCTIONS plain
#include "reduce_kernels.h"
