// p-norms as a reduction: a term per element, combined in any tree, and the root at the end. acc_t
// is float or double, or on the CPU a vector of them, whose operators work element by element.
#pragma once

#include <cmath>

#include "math/host_device.h"

namespace accumext {

enum class NormKind { kAbs, kSquares, kPowers, kMax, kMin };  // p = 1, 2, other, inf, -inf

inline NormKind norm_kind(double p) {
  if (p == 1.0) return NormKind::kAbs;
  if (p == 2.0) return NormKind::kSquares;
  if (std::isinf(p)) return p > 0 ? NormKind::kMax : NormKind::kMin;
  return NormKind::kPowers;
}

// The contribution of some elements to a norm, and whether all of them are finite.
struct Partial {
  double total;
  bool finite;
};

// |x|; the sum makes 0 of -0.
template <typename acc_t>
ACCUMEXT_HOST_DEVICE inline acc_t magnitude(acc_t x) {
  return x < 0 ? -x : x + 0;
}

template <NormKind kKind>
struct Norm {
  double p;

  template <typename acc_t>
  ACCUMEXT_HOST_DEVICE static acc_t identity() {
    return kKind == NormKind::kMin ? acc_t(INFINITY) : acc_t(0);
  }

  template <typename acc_t>
  ACCUMEXT_HOST_DEVICE acc_t term(acc_t x) const {
    if constexpr (kKind == NormKind::kSquares) {
      return x * x;
    } else if constexpr (kKind == NormKind::kPowers) {  // of scalars only
      return std::pow(magnitude(x), static_cast<acc_t>(p));
    } else {
      return magnitude(x);
    }
  }

  // True if the norm is no less than the magnitude of each element, and not finite if one is not.
  ACCUMEXT_HOST_DEVICE bool grows() const { return kKind != NormKind::kMin && p > 0.0; }

  // Max and min keep a NaN from either side; std::fmax would drop it. `|` also works for vectors.
  template <typename acc_t>
  ACCUMEXT_HOST_DEVICE static acc_t combine(acc_t a, acc_t b) {
    if constexpr (kKind == NormKind::kMax) {
      return (b > a) | (b != b) ? b : a;
    } else if constexpr (kKind == NormKind::kMin) {
      return (b < a) | (b != b) ? b : a;
    } else {
      return a + b;
    }
  }

  ACCUMEXT_HOST_DEVICE static Partial none() { return {identity<double>(), true}; }

  ACCUMEXT_HOST_DEVICE static Partial combine(const Partial& a, const Partial& b) {
    return {combine(a.total, b.total), a.finite && b.finite};
  }

  ACCUMEXT_HOST_DEVICE double root(double total) const {
    if constexpr (kKind == NormKind::kSquares) {
      return std::sqrt(total);
    } else if constexpr (kKind == NormKind::kPowers) {
      return std::pow(total, 1.0 / p);
    } else {
      return total;
    }
  }
};

// min(1, max_norm / (norm + 1e-6)), NaN if the norm is NaN. torch divides a number by a tensor as
// reciprocal times number, and so does this, for the same bits. Without a limit it is 1, even if
// the norm of finite gradients overflowed.
template <typename acc_t>
ACCUMEXT_HOST_DEVICE inline acc_t clip_coef(acc_t norm, acc_t max_norm) {
  if (std::isinf(max_norm)) return acc_t(1);
  const acc_t coef = acc_t(1) / (norm + acc_t(1e-6)) * max_norm;
  return coef > acc_t(1) ? acc_t(1) : coef;
}

}  // namespace accumext
