// The reducers and quantizers for this instruction set.
#define HVKERAS_INSTRUCTIONS avx2
#include "quantize_kernels.h"
