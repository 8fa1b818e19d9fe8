// exp, sigmoid and tanh of vectors. In float by the polynomials of Moshier's Cephes library, within
// two units in the last place; in double by the C library, one element at a time.
#pragma once

#include "cpu/simd/vectors.h"

namespace accumext::cpu {
namespace {

// Elements in a register.
template <typename T>
constexpr int kRegister = kVectorBytes / sizeof(T);

// a * b + c, rounded only once if the instruction set can do that.
template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> multiply_add(Vector<T, kSize> a, Vector<T, kSize> b,
                                                            Vector<T, kSize> c) {
  [[maybe_unused]] constexpr int kBytes = sizeof(T) * kSize;
#if ACCUMEXT_VECTOR_BYTES >= 64
  if constexpr (kBytes == 64) {
    if constexpr (std::is_same_v<T, float>) {
      return _mm512_fmadd_ps(a, b, c);
    } else {
      return _mm512_fmadd_pd(a, b, c);
    }
  }
#endif
#if ACCUMEXT_VECTOR_BYTES >= 32
  if constexpr (kBytes == 32) {
    if constexpr (std::is_same_v<T, float>) {
      return _mm256_fmadd_ps(a, b, c);
    } else {
      return _mm256_fmadd_pd(a, b, c);
    }
  }
#endif
  return a * b + c;
}

// Horner's rule, the highest coefficient first.
template <int kSize>
[[gnu::always_inline]] inline Vector<float, kSize> polynomial(Vector<float, kSize> x,
                                                              const float* c, int count) {
  Vector<float, kSize> y = splat<float, kSize>(c[0]);
  for (int i = 1; i < count; ++i) y = multiply_add<float, kSize>(y, x, splat<float, kSize>(c[i]));
  return y;
}

// e^x for x <= 0, 0 below the normal numbers; exp(0) is exactly 1, and a NaN stays one.
template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> exp_of_negative(Vector<T, kSize> x) {
  if constexpr (std::is_same_v<T, double>) {
    for (int i = 0; i < kSize; ++i) x[i] = std::exp(x[i]);
    return x;
  } else {
    constexpr float kLeast = -87.33654f;   // log of the least normal number
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    static constexpr float kTerms[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                       4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    using V = Vector<float, kSize>;
    const auto all = [](float value) { return splat<float, kSize>(value); };
    const V bounded = x < kLeast ? all(kLeast) : x;
    const V shifted = multiply_add<float, kSize>(bounded, all(1.44269504f), all(kRound));
    const V n = shifted - kRound;
    // ln 2 in two parts, the first of few bits.
    V r = multiply_add<float, kSize>(n, all(-0.693359375f), bounded);
    r = multiply_add<float, kSize>(n, all(2.12194440e-4f), r);
    V y = polynomial<kSize>(r, kTerms, 6);
    y = multiply_add<float, kSize>(y, r * r, r) + 1.0f;
    const auto exponent = bits<Vector<int32_t, kSize>>(shifted) - bits<int32_t>(kRound) + 127;
    y = y * bits<V>(exponent << 23);
    return x < kLeast ? V{} : y;
  }
}

template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> magnitude(Vector<T, kSize> x) {
  return x < 0 ? -x : x;
}

template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> sigmoid(Vector<T, kSize> x) {
  const Vector<T, kSize> e = exp_of_negative<T, kSize>(-magnitude<T, kSize>(x));
  return (x < 0 ? e : splat<T, kSize>(1)) / (e + 1);
}

template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> tanh(Vector<T, kSize> x) {
  if constexpr (std::is_same_v<T, double>) {
    for (int i = 0; i < kSize; ++i) x[i] = std::tanh(x[i]);
    return x;
  } else {
    static constexpr float kTerms[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f,
                                       1.33314422036e-1f, -3.33332819422e-1f};
    using V = Vector<float, kSize>;
    const V size = magnitude<T, kSize>(x);
    const V e = exp_of_negative<float, kSize>(size * -2.0f);
    const V far = (1.0f - e) / (1.0f + e);
    const V square = x * x;
    const V near = multiply_add<float, kSize>(polynomial<kSize>(square, kTerms, 5) * square, x, x);
    return size < 0.625f ? near : (x < 0 ? -far : far);
  }
}

}  // namespace
}  // namespace accumext::cpu
