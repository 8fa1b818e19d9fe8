// The kernels for any processor of the architecture. On x86 only processors of before 2013 need
// them, so they are compiled at O1, which shortens every build.
#if defined(__x86_64__)
#pragma GCC optimize("O1")
#endif
#define ACCUMEXT_VECTOR_BYTES 16
#include "cpu/bodies.h"
#include "cpu/copy_rounded_body.h"
#include "cpu/decoder/bodies.h"

const accumext::cpu::Kernels accumext::cpu::kPortableKernels = {norm, accumulate, scale,
                                                                copy_rounded};
const accumext::cpu::DecoderKernels<float> accumext::cpu::kPortableFloat =
    accumext::cpu::kDecoderKernels<float>;
const accumext::cpu::DecoderKernels<double> accumext::cpu::kPortableDouble =
    accumext::cpu::kDecoderKernels<double>;
