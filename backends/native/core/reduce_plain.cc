// The reducers for this instruction set; see reduce_kernels.h.
#define HVKERAS_INSTRUCTIONS plain
#include "reduce_kernels.h"
