#include "cpu/decoder_kernels.h"
#include "isa.h"

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

PairedProduct paired_product() {
#if defined(__x86_64__)
  static const bool supported =
      widest_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16");
  static const bool tiles = supported && amx_granted();
  if (supported) return tiles ? paired_product_amx : paired_product_avx512;
#endif
  return nullptr;
}

}  // namespace accumext::cpu
