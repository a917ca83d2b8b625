// The reducers and quantizers for this instruction set.
#define HVKERAS_INSTRUCTIONS avx512
#include "quantize_kernels.h"
