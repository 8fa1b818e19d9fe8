#include "cpu/decoder/kernels.h"

#include "cpu/simd/isa.h"

namespace accumext::cpu {
namespace {

template <typename T>
const DecoderKernels<T>& choose(const DecoderKernels<T>& portable, const DecoderKernels<T>& avx2,
                                const DecoderKernels<T>& avx512) {
  switch (widest_isa()) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    default:
      return portable;
  }
}

}  // namespace

template <>
const DecoderKernels<float>& decoder_kernels<float>() {
#if defined(__x86_64__)
  static const auto& kernels = choose(kPortableFloat, kAvx2Float, kAvx512Float);
  return kernels;
#else
  return kPortableFloat;
#endif
}

template <>
const DecoderKernels<double>& decoder_kernels<double>() {
#if defined(__x86_64__)
  static const auto& kernels = choose(kPortableDouble, kAvx2Double, kAvx512Double);
  return kernels;
#else
  return kPortableDouble;
#endif
}

const PairedKernels* paired_kernels() {
#if defined(__x86_64__)
  static const PairedKernels* const kernels = []() -> const PairedKernels* {
    if (widest_isa() != Isa::kAvx512 || !__builtin_cpu_supports("avx512bf16")) return nullptr;
#if defined(ACCUMEXT_AMX)
    if (amx_granted()) return &kPairedAmx;
#endif
    return &kPairedAvx512;
  }();
  return kernels;
#else
  return nullptr;
#endif
}

}  // namespace accumext::cpu
