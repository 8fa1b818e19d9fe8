// Stochastic rounding: to one of the two neighbours of a number among those with fewer digits, with
// the probability of its distance from the other one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "math/host_device.h"

namespace accumext {

// Binary floating-point numbers: the bits of the mantissa without the leading one, and the bias of
// the exponent above them.
struct Format {
  int mantissa;
  int bias;
};

constexpr Format kHalfFormat{10, 15};
constexpr Format kBFloat16Format{7, 127};
constexpr Format kFloatFormat{23, 127};
constexpr Format kDoubleFormat{52, 1023};

// From a format to a narrower one. Magnitudes are the bits of numbers without their sign.
template <Format kSource, Format kTarget>
struct Narrowing {
  static constexpr int kDropped = kSource.mantissa - kTarget.mantissa;  // digits
  // The exponent of the target's smallest normal numbers, biased as the source's.
  static constexpr int kLeastNormal = kSource.bias - kTarget.bias + 1;
  // The target's largest finite number, as a magnitude of the source.
  static constexpr uint64_t kLargest = (uint64_t(kSource.bias + kTarget.bias) << kSource.mantissa) +
                                       (((uint64_t{1} << kTarget.mantissa) - 1) << kDropped);
  // Random bits of an element. Only where exponents are the same are there never more digits to
  // drop than kDropped.
  static constexpr int kRandomBits = kLeastNormal == 1 && kDropped <= 16 ? 16 : 32;

  // The magnitude of the target for a magnitude of the source up to kLargest. Random bits are added
  // to the digits that are dropped, and carry into those that stay; of more than kMostCounted, the
  // first count. U: uint32_t or uint64_t, as wide as the source, or on the CPU a vector of them.
  template <typename U>
  ACCUMEXT_HOST_DEVICE static U magnitude(U source, U random) {
    if constexpr (kLeastNormal == 1 && kDropped <= kRandomBits) {
      return (source + (random >> (kRandomBits - kDropped))) >> kDropped;
    } else {
      const U exponent = source >> kSource.mantissa;
      const U base = at_most(kLeastNormal, at_least(1, exponent));
      const U digits = source - ((base - 1) << kSource.mantissa);
      const U dropped = U{} + (kDropped + kLeastNormal) - base;
      const U counted = at_most(kMostCounted, dropped);
      const U ignored = at_most(kSourceBits - 1, dropped - counted);  // leaves 0 where it is so
      return ((digits >> ignored) + (random >> (kRandomBits - counted))) >> counted;
    }
  }

 private:
  static constexpr int kMostCounted = 31;
  static constexpr int kSourceBits = kSource.mantissa > 31 ? 64 : 32;

  template <typename U>
  ACCUMEXT_HOST_DEVICE static U at_least(unsigned least, U x) {
    const U bound = U{} + least;
    return x < bound ? bound : x;
  }

  template <typename U>
  ACCUMEXT_HOST_DEVICE static U at_most(unsigned most, U x) {
    const U bound = U{} + most;
    return x < bound ? x : bound;
  }
};

}  // namespace accumext
