// The numbers that a window's step needs, from the norm of its main gradients: the formula of
// accumext/ops/reference.py, in double.
#pragma once

#include "math/accumulate.h"
#include "math/host_device.h"

namespace accumext {

// A window's numbers but for the norm: doubles, or what holds them.
template <typename Number>
struct WindowNumbers {
  Number base_weight, weight, scale;  // their quotient makes the gradient of the sums
  Number overflow;                    // not 0 if a sum is not finite
  Number found_inf;                   // not 0 if a gradient that came in was not finite
  Number counted;                     // micro-batches that count, if others were left out
};

struct WindowRules {
  double max_norm;  // read only if `clips`
  bool clips;
  bool weighted;     // divided by weight; with a weight of 0 the gradient is 0
  bool counted;      // `counted` is known: a micro-batch that is not finite is no reason to skip
  bool normalised;   // the norm is already that of the window's gradient
  bool checks_norm;  // a norm that is not finite skips the step
};

struct WindowFactors {
  double norm, clip_coef, factor;  // norm before clipping; factor of the sums, with clip
  bool skip, found_inf;

  // As the operator returns them: numbers [3], flags [3].
  ACCUMEXT_HOST_DEVICE void write(double* numbers, float* flags) const {
    numbers[0] = norm;
    numbers[1] = clip_coef;
    numbers[2] = factor;
    flags[0] = static_cast<float>(1.0 / factor);
    flags[1] = skip ? 1.0f : 0.0f;
    flags[2] = found_inf ? 1.0f : 0.0f;
  }
};

// finite: whether all sums are, as far as the caller knows.
ACCUMEXT_HOST_DEVICE inline WindowFactors window_factors(double norm, bool finite,
                                                         const WindowNumbers<double>& numbers,
                                                         const WindowRules& rules) {
  double relative = numbers.base_weight;
  if (rules.weighted) {
    const bool positive = numbers.weight > 0.0;
    relative = relative / (positive ? numbers.weight : 1.0) * (positive ? 1.0 : 0.0);
  }
  const double normaliser = relative / numbers.scale;
  double probe = nonfinite_probe(normaliser);
  if (rules.checks_norm) probe += nonfinite_probe(norm);
  const bool broken = !finite || numbers.overflow != 0.0 || !is_finite_probe(probe);
  if (!rules.normalised) norm = norm * normaliser;
  double clip_coef = 1.0;
  if (rules.clips) {
    clip_coef = rules.max_norm / (norm + 1e-6);
    if (clip_coef > 1.0) clip_coef = 1.0;
  }
  const bool anything = broken || numbers.found_inf != 0.0;
  const bool skip = rules.counted ? broken || numbers.counted == 0.0 : anything;
  return {norm, clip_coef, rules.clips ? normaliser * clip_coef : normaliser, skip, anything};
}

}  // namespace accumext
