// The reducers and quantizers for this instruction set.
#define HVKERAS_INSTRUCTIONS plain
#include "quantize_kernels.h"
