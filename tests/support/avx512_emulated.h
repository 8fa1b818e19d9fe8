// The instructions of AVX-512 that the CPU kernels name, each by two of AVX2, for processors that
// have no others. `emulated_avx512` of cpu_library.py puts these functions in the place of the
// intrinsics.
#pragma once

#include "cpu/simd/plain_headers.h"

#pragma GCC diagnostic ignored "-Wignored-attributes"  // of template arguments

namespace {
namespace avx512 {

// A part of x, by its number.
template <typename Part, typename Whole>
[[gnu::always_inline]] inline Part part(const Whole& x, int number) {
  Part result;
  std::memcpy(&result, reinterpret_cast<const char*>(&x) + number * sizeof(Part), sizeof(Part));
  return result;
}

template <typename Whole, typename Part>
[[gnu::always_inline]] inline Whole joined(const Part& low, const Part& high) {
  Whole result;
  static_assert(sizeof(Whole) == 2 * sizeof(Part));
  std::memcpy(&result, &low, sizeof(Part));
  std::memcpy(reinterpret_cast<char*>(&result) + sizeof(Part), &high, sizeof(Part));
  return result;
}

// A function that returns a Whole, of operands whose halves are of type Half.
#define BY_HALVES(NAME, INTRINSIC, Whole, Half)                                           \
  template <typename... Operands>                                                         \
  [[gnu::always_inline]] inline Whole NAME(const Operands&... x) {                        \
    return joined<Whole>(INTRINSIC(part<Half>(x, 0)...), INTRINSIC(part<Half>(x, 1)...)); \
  }

BY_HALVES(fmadd_ps, _mm256_fmadd_ps, __m512, __m256)
BY_HALVES(fmadd_pd, _mm256_fmadd_pd, __m512d, __m256d)
BY_HALVES(mul_epu32, _mm256_mul_epu32, __m512i, __m256i)
BY_HALVES(or_si512, _mm256_or_si256, __m512i, __m256i)
BY_HALVES(unpacklo_epi32, _mm256_unpacklo_epi32, __m512i, __m256i)
BY_HALVES(unpackhi_epi32, _mm256_unpackhi_epi32, __m512i, __m256i)
BY_HALVES(unpacklo_epi64, _mm256_unpacklo_epi64, __m512i, __m256i)
BY_HALVES(unpackhi_epi64, _mm256_unpackhi_epi64, __m512i, __m256i)
BY_HALVES(cvtepu16_epi32, _mm256_cvtepu16_epi32, __m512i, __m128i)
BY_HALVES(cvtph_ps, _mm256_cvtph_ps, __m512, __m128i)

#undef BY_HALVES

[[gnu::always_inline]] inline __m256i cvtps_ph(const __m512& x, int) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  return joined<__m256i>(_mm256_cvtps_ph(part<__m256>(x, 0), kNearest),
                         _mm256_cvtps_ph(part<__m256>(x, 1), kNearest));
}

[[gnu::always_inline]] inline __m512i slli_epi32(const __m512i& x, int count) {
  return joined<__m512i>(_mm256_slli_epi32(part<__m256i>(x, 0), count),
                         _mm256_slli_epi32(part<__m256i>(x, 1), count));
}

[[gnu::always_inline]] inline __m512i shuffle_i32x4(const __m512i& a, const __m512i& b, int which) {
  const auto quarter = [&](const __m512i& x, int bit) {
    return part<__m128i>(x, which >> bit & 3);
  };
  return joined<__m512i>(joined<__m256i>(quarter(a, 0), quarter(a, 2)),
                         joined<__m256i>(quarter(b, 4), quarter(b, 6)));
}

[[gnu::always_inline]] inline __m512i setzero_si512() { return __m512i{}; }

[[gnu::always_inline]] inline __m512i set1_epi32(int32_t x) {
  return joined<__m512i>(_mm256_set1_epi32(x), _mm256_set1_epi32(x));
}

[[gnu::always_inline]] inline __m512i loadu_si512(const void* from) {
  __m512i x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

[[gnu::always_inline]] inline void storeu_si512(void* to, const __m512i& x) {
  std::memcpy(to, &x, sizeof(x));
}

[[gnu::always_inline]] inline void stream_si512(__m512i* to, const __m512i& x) {
  auto* halves = reinterpret_cast<__m256i*>(to);
  _mm256_stream_si256(halves, part<__m256i>(x, 0));
  _mm256_stream_si256(halves + 1, part<__m256i>(x, 1));
}

[[gnu::always_inline]] inline __m256i maskz_loadu_epi16(uint16_t mask, const void* from) {
  uint16_t words[16] = {};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) std::memcpy(words + i, static_cast<const uint16_t*>(from) + i, 2);
  }
  return part<__m256i>(words, 0);
}

// Both products of each pair of bfloat16 are added to a float.
[[gnu::always_inline]] inline __m512 dpbf16_ps(const __m512& sum, const __m512bh& x,
                                               const __m512bh& y) {
  const auto half = [&](int i) {
    const auto odd = [&](const __m512bh& pairs) {
      const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
      return _mm256_castsi256_ps(_mm256_and_si256(part<__m256i>(pairs, i), mask));
    };
    const auto even = [&](const __m512bh& pairs) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(part<__m256i>(pairs, i), 16));
    };
    const __m256 first = _mm256_fmadd_ps(odd(x), odd(y), part<__m256>(sum, i));
    return _mm256_fmadd_ps(even(x), even(y), first);
  };
  return joined<__m512>(half(0), half(1));
}

}  // namespace avx512
}  // namespace
