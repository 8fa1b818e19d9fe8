// Vector registers of the instruction set that kernels_*.cpp chose before including this. Macros of
// the compiler do not tell which: g++ 12 defines them before it sees the choice.
#pragma once

#include "cpu/simd/plain_headers.h"

namespace accumext::cpu {
namespace {

// Bytes of a register: with 32, there is AVX2 and F16C; with 64, AVX-512.
constexpr int kVectorBytes = ACCUMEXT_VECTOR_BYTES;

template <typename T, int kSize>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kSize)));
};
template <typename T, int kSize>
using Vector = typename VectorOf<T, kSize>::type;

template <typename T>
constexpr bool is_half = std::is_same_v<T, torch::headeronly::Half>;
template <typename T>
constexpr bool is_bfloat16 = std::is_same_v<T, torch::headeronly::BFloat16>;

template <typename To, int kSize, typename From>
[[gnu::always_inline]] inline Vector<To, kSize> converted(Vector<From, kSize> x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else {
    return __builtin_convertvector(x, Vector<To, kSize>);
  }
}

template <typename To, typename From>
[[gnu::always_inline]] inline To bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &x, sizeof(To));
  return result;
}

// x in every element. Written so that g++ 12 makes one instruction of it.
template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> splat(T x) {
  return x - Vector<T, kSize>{};
}

// 0, 1, 2, ...
template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> iota() {
  Vector<T, kSize> result;
  for (int i = 0; i < kSize; ++i) result[i] = static_cast<T>(i);
  return result;
}

// Elements of x, and behind them those of y, by their numbers.
template <int a, int b, int c, int d, typename T>
[[gnu::always_inline]] inline Vector<T, 4> picked(const Vector<T, 4>& x, const Vector<T, 4>& y) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(x, y, a, b, c, d);
#else
  using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  return __builtin_shuffle(x, y, Vector<Index, 4>{a, b, c, d});
#endif
}

template <typename T>
[[gnu::always_inline]] inline T raw(const void* from) {
  T x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// g++ 12's code for __builtin_convertvector takes several times as long as this instruction.
template <int kSize>
[[gnu::always_inline]] inline Vector<uint32_t, kSize> load_uint16(const void* from) {
#if ACCUMEXT_VECTOR_BYTES >= 64
  if constexpr (kSize == 16) {
    return bits<Vector<uint32_t, 16>>(_mm512_cvtepu16_epi32(raw<__m256i>(from)));
  }
#endif
#if ACCUMEXT_VECTOR_BYTES >= 32
  if constexpr (kSize == 8) {
    return bits<Vector<uint32_t, 8>>(_mm256_cvtepu16_epi32(raw<__m128i>(from)));
  } else if constexpr (kSize == 4) {
    return bits<Vector<uint32_t, 4>>(
        _mm_cvtepu16_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
  }
#endif
  return converted<uint32_t, kSize, uint16_t>(raw<Vector<uint16_t, kSize>>(from));
}

template <int kSize>
[[gnu::always_inline]] inline Vector<float, kSize> load_half(const torch::headeronly::Half* from) {
#if ACCUMEXT_VECTOR_BYTES >= 64
  if constexpr (kSize == 16) return _mm512_cvtph_ps(raw<__m256i>(from));
#endif
#if ACCUMEXT_VECTOR_BYTES >= 32
  if constexpr (kSize == 8) {
    return _mm256_cvtph_ps(raw<__m128i>(from));
  } else if constexpr (kSize == 4) {
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  } else if constexpr (kSize == 1) {
    return Vector<float, 1>{_cvtsh_ss(from->x)};
  }
#endif
  Vector<float, kSize> x;
  for (int i = 0; i < kSize; ++i) x[i] = static_cast<float>(from[i]);
  return x;
}

// kSize elements as acc_t.
template <typename acc_t, int kSize, typename scalar_t>
[[gnu::always_inline]] inline Vector<acc_t, kSize> load(const scalar_t* from) {
  if constexpr (is_half<scalar_t>) {
    return converted<acc_t, kSize, float>(load_half<kSize>(from));
  } else if constexpr (is_bfloat16<scalar_t>) {
    const auto wide = bits<Vector<float, kSize>>(load_uint16<kSize>(from) << 16);
    return converted<acc_t, kSize, float>(wide);
  } else {
    return converted<acc_t, kSize, scalar_t>(raw<Vector<scalar_t, kSize>>(from));
  }
}

template <int kSize>
[[gnu::always_inline]] inline Vector<uint16_t, kSize> half_bits(Vector<float, kSize> x) {
#if ACCUMEXT_VECTOR_BYTES >= 32
  if constexpr (kSize == 4) {
    const __m128i packed = _mm_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    return raw<Vector<uint16_t, 4>>(&packed);
  } else if constexpr (kSize == 8) {
    return bits<Vector<uint16_t, 8>>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
#if ACCUMEXT_VECTOR_BYTES >= 64
  if constexpr (kSize == 16) {
    return bits<Vector<uint16_t, 16>>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  Vector<uint16_t, kSize> result;
  for (int i = 0; i < kSize; ++i) result[i] = torch::headeronly::Half(x[i]).x;
  return result;
}

// Rounds to nearest, ties to even. In integers: AVX512-BF16's instruction makes 0 of subnormals.
template <int kSize>
[[gnu::always_inline]] inline Vector<uint16_t, kSize> bfloat16_bits(Vector<float, kSize> x) {
  const auto wide = bits<Vector<uint32_t, kSize>>(x);
  const auto nearest = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  const auto quiet_nan = Vector<uint32_t, kSize>{} + 0x7fc0;
  return converted<uint16_t, kSize, uint32_t>(x == x ? nearest : quiet_nan);
}

// x as it is stored. PyTorch rounds double to half by way of float, and so does this.
template <typename scalar_t, int kSize, typename acc_t>
[[gnu::always_inline]] inline auto rounded(Vector<acc_t, kSize> x) {
  if constexpr (is_half<scalar_t>) {
    return half_bits<kSize>(converted<float, kSize, acc_t>(x));
  } else if constexpr (is_bfloat16<scalar_t>) {
    return bfloat16_bits<kSize>(converted<float, kSize, acc_t>(x));
  } else {
    return converted<scalar_t, kSize, acc_t>(x);
  }
}

// Prefetches the cache lines that are kAhead bytes behind a block of kSize elements. It is worth a
// twentieth of the bandwidth if a block takes more than a few instructions, so that fewer blocks
// are in flight at a time. The distances were the best of 0, 256, 512 and 1024 on a Zen 3.
template <int kSize, int kAhead, typename T>
[[gnu::always_inline]] inline void prefetch(const T* block) {
  constexpr int kLine = 64;  // bytes
  // A number, since it may be the address of no object.
  const uintptr_t address = reinterpret_cast<uintptr_t>(block) + kAhead;
  for (int i = 0; i < kSize * static_cast<int>(sizeof(T)); i += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + i));
  }
}

// Writes past the caches: a line that is overwritten whole need not be read first. `to` must be
// aligned to the vector.
template <typename V>
[[gnu::always_inline]] inline void stream(void* to, const V& x) {
#if ACCUMEXT_VECTOR_BYTES >= 64
  if constexpr (sizeof(V) == 64) {
    return _mm512_stream_si512(static_cast<__m512i*>(to), bits<__m512i>(x));
  }
#endif
#if ACCUMEXT_VECTOR_BYTES >= 32
  if constexpr (sizeof(V) == 32) {
    return _mm256_stream_si256(static_cast<__m256i*>(to), bits<__m256i>(x));
  }
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16) {
    return _mm_stream_si128(static_cast<__m128i*>(to), bits<__m128i>(x));
  }
#endif
  std::memcpy(to, &x, sizeof(V));
}

// Orders streamed stores before all later ones, by which other threads learn of them.
[[gnu::always_inline]] inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace accumext::cpu
