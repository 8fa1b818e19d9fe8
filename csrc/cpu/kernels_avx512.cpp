// The kernels for processors with AVX-512.
#if defined(__x86_64__)
#include "cpu/plain_headers.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c")
#define ACCUMEXT_VECTOR_BYTES 64
#include "cpu/bodies.h"

const accumext::cpu::Kernels accumext::cpu::kAvx512Kernels = {norm, accumulate, scale};
#endif
