// The instruction set of the CPU kernels: the widest that the processor has, or less if torch is
// told to use less (ATEN_CPU_CAPABILITY=default, avx2 or avx512).
#pragma once

#include <cstdlib>
#include <string_view>

namespace accumext {

enum class Isa { kPortable, kAvx2, kAvx512 };

inline Isa widest_isa() {
#if defined(__x86_64__)
  const char* variable = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view wish = variable != nullptr ? variable : "";
  if (wish == "default") return Isa::kPortable;
  const auto has = [](auto... supported) { return (supported && ...); };
  if (wish != "avx2" && has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"),
                            __builtin_cpu_supports("avx512vl"), __builtin_cpu_supports("avx512dq"),
                            __builtin_cpu_supports("fma"))) {
    return Isa::kAvx512;
  }
  if (has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("f16c"),
          __builtin_cpu_supports("fma"))) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kPortable;
}

inline const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "AVX-512";
    case Isa::kAvx2:
      return "AVX2";
    default:
      return "portable";
  }
}

}  // namespace accumext
