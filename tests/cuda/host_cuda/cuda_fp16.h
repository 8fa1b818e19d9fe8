// IEEE half as CUDA's header of this name has it, for the host: as much as the kernels use.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

struct __half {
  uint16_t bits;  // sign, 5 of exponent, 10 of mantissa

  operator float() const {
    const int exponent = bits >> 10 & 31;
    const int mantissa = bits & 1023;
    float magnitude;
    if (exponent == 31) {
      magnitude = mantissa == 0 ? INFINITY : NAN;
    } else {
      magnitude =
          std::ldexp(exponent == 0 ? mantissa : mantissa + 1024.0f, std::max(exponent, 1) - 25);
    }
    return bits >> 15 ? -magnitude : magnitude;
  }
};

// To nearest, ties to even.
inline __half __float2half_rn(float x) {
  if (x != x) return {0x7fff};
  const int sign = std::bit_cast<uint32_t>(x) >> 16 & 0x8000;
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent = -13;  // subnormals are as far apart as the smallest normal numbers
  if (magnitude >= 0x1p-14f) std::frexp(magnitude, &exponent);
  // Up to 2048 units in the last place; from 1024 on they carry into the exponent.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));
  return {static_cast<uint16_t>(sign | (((exponent + 13) << 10) + units))};
}
