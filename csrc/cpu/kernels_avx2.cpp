// The kernels for processors with AVX2.
#if defined(__x86_64__)
#include "cpu/plain_headers.h"
#pragma GCC target("avx2,f16c")
#define ACCUMEXT_VECTOR_BYTES 32
#include "cpu/bodies.h"

const accumext::cpu::Kernels accumext::cpu::kAvx2Kernels = {norm, accumulate, scale};
#endif
