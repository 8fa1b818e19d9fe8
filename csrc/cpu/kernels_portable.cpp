// The kernels for any processor of the architecture.
#define ACCUMEXT_VECTOR_BYTES 16
#include "cpu/bodies.h"

const accumext::cpu::Kernels accumext::cpu::kPortableKernels = {norm, accumulate, scale};
