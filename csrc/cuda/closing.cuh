// The numbers of a window's step, written on the device by the last thread that forms the norm.
#pragma once

#include "cuda/device.cuh"
#include "math/window_factors.h"

namespace accumext::cuda {

// The sources of the numbers of a window, and the memory for its factors.
struct Closing {
  WindowNumbers<Scalar> window;
  WindowRules rules;
  double* numbers = nullptr;  // [3]: norm, clip_coef, factor
  float* flags = nullptr;     // [3]: 1 / factor, skip, found_inf
};

// Called by one thread. finite: whether all sums are finite, as far as the caller knows.
__device__ inline void close_window(const Closing& closing, double norm, bool finite) {
  const WindowNumbers<Scalar>& held = closing.window;
  window_factors(norm, finite,
                 {value(held.base_weight), value(held.weight), value(held.scale),
                  value(held.overflow), value(held.found_inf), value(held.counted)},
                 closing.rules)
      .write(closing.numbers, closing.flags);
}

}  // namespace accumext::cuda
