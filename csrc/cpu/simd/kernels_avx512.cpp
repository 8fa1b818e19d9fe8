// The kernels for processors with AVX-512.
#if defined(__x86_64__)
#include "cpu/simd/plain_headers.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")
#define ACCUMEXT_VECTOR_BYTES 64
#include "cpu/bodies.h"
#include "cpu/copy_rounded_body.h"
#include "cpu/decoder/bodies.h"

const accumext::cpu::Kernels accumext::cpu::kAvx512Kernels = {norm, accumulate, scale,
                                                              copy_rounded};
const accumext::cpu::DecoderKernels<float> accumext::cpu::kAvx512Float =
    accumext::cpu::kDecoderKernels<float>;
const accumext::cpu::DecoderKernels<double> accumext::cpu::kAvx512Double =
    accumext::cpu::kDecoderKernels<double>;
#endif
