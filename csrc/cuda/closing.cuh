// The numbers of a window's step, written on the device by the last thread that forms the norm.
#pragma once

#include "cuda/device.cuh"
#include "math/window_factors.h"

namespace accumext::cuda {

// The sources of the numbers of a window, and the memory for its factors.
struct Closing {
  Scalar unit, weight, scale, overflow, found_inf, finite;
  WindowRules rules;
  double* numbers = nullptr;  // [3]: norm, clip_coef, factor
  float* flags = nullptr;     // [3]: 1 / factor, skip, found_inf
};

// Called by one thread. finite: whether all main gradients are finite, as far as the caller knows.
__device__ inline void close_window(const Closing& closing, double norm, bool finite) {
  const WindowFactors factors =
      window_factors(norm, !finite || value(closing.overflow) != 0.0,
                     {value(closing.unit), value(closing.weight), value(closing.scale),
                      value(closing.found_inf), value(closing.finite)},
                     closing.rules);
  closing.numbers[0] = factors.norm;
  closing.numbers[1] = factors.clip_coef;
  closing.numbers[2] = factors.factor;
  closing.flags[0] = static_cast<float>(1.0 / factors.factor);
  closing.flags[1] = factors.skip ? 1.0f : 0.0f;
  closing.flags[2] = factors.found_inf ? 1.0f : 0.0f;
}

}  // namespace accumext::cuda
