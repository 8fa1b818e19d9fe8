// The kernels for processors with AVX2.
#if defined(__x86_64__)
#include "cpu/simd/plain_headers.h"
#pragma GCC target("avx2,f16c,fma")
#define ACCUMEXT_VECTOR_BYTES 32
#include "cpu/bodies.h"
#include "cpu/copy_rounded_body.h"
#include "cpu/decoder/bodies.h"

const accumext::cpu::Kernels accumext::cpu::kAvx2Kernels = {norm, accumulate, scale, copy_rounded};
const accumext::cpu::DecoderKernels<float> accumext::cpu::kAvx2Float =
    accumext::cpu::kDecoderKernels<float>;
const accumext::cpu::DecoderKernels<double> accumext::cpu::kAvx2Double =
    accumext::cpu::kDecoderKernels<double>;
#endif
