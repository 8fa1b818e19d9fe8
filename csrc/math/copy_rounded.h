// Stochastic rounding: to one of a number's two neighbours in the narrower format. The probability
// of each is the distance from the other one, over the distance between both.
#pragma once

#include <cstdint>

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

// From a format to a narrower one. Magnitudes are the bits of numbers without their sign; U is
// uint32_t or uint64_t, as wide as the source, or on the CPU a vector of them. Random bits are
// added to the digits that are dropped, and carry into those that stay.
template <Format kSource, Format kTarget>
struct Narrowing {
  static constexpr int kDropped = kSource.mantissa - kTarget.mantissa;  // digits
  // The exponent of the target's least normal numbers, biased as the source's.
  static constexpr int kLeastExponent = kSource.bias - kTarget.bias + 1;
  // The least magnitude of the source from which no more than kDropped digits are dropped.
  static constexpr uint64_t kLeastNormal =
      kLeastExponent == 1 ? 0 : uint64_t{kLeastExponent} << kSource.mantissa;
  // The target's largest finite number, as a magnitude of the source.
  static constexpr uint64_t kLargest = (uint64_t{kSource.bias + kTarget.bias} << kSource.mantissa) +
                                       (((uint64_t{1} << kTarget.mantissa) - 1) << kDropped);
  // True if 16 random bits suffice for kLeastNormal to kLargest.
  static constexpr bool kFew = kDropped <= 16;

  // The magnitude in the target of one from kLeastNormal to kLargest, with 16 random bits.
  template <typename U>
  ACCUMEXT_HOST_DEVICE static U of_normal(U source, U random) {
    static_assert(kFew);
    constexpr uint32_t kRebias = uint32_t{kLeastExponent - 1} << kSource.mantissa;
    return (source - kRebias + (random >> (16 - kDropped))) >> kDropped;
  }

  // The magnitude in the target of one up to kLargest, with 31 of 32 random bits. If more digits
  // than that are dropped, only the first 31 count.
  template <typename U>
  ACCUMEXT_HOST_DEVICE static U of_any(U source, U random) {
    const U exponent = source >> kSource.mantissa;
    const U base = at_most(kLeastExponent, at_least(1, exponent));
    const U digits = source - ((base - 1) << kSource.mantissa);
    const U dropped = U{} + (kDropped + kLeastExponent) - base;
    const U counted = at_most(kMostCounted, dropped);
    const U ignored = at_most(kSourceBits - 1, dropped - counted);  // a longer shift is undefined
    return ((digits >> ignored) + (random >> (32 - counted))) >> counted;
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
