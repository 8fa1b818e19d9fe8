// The numbers that a window's step needs, from the norm of its main gradients: the formula of
// accumext/ops/reference.py, in double.
#pragma once

#include "math/accumulate.h"
#include "math/host_device.h"

namespace accumext {

// A window's numbers but for the norm.
struct WindowNumbers {
  double unit, weight, scale;  // their quotient makes the window's gradient of its main gradients
  double found_inf;            // 1 if a gradient that came in was not finite
  double finite;               // finite micro-batches, if the others were left out
};

struct WindowRules {
  double max_norm;   // with clips
  bool clips;        // to max_norm
  bool weighted;     // divided by weight; with a weight of 0 the gradient is 0
  bool counted;      // `finite` is known: a micro-batch that is not finite is no reason to skip
  bool normalised;   // the norm is already that of the window's gradient
  bool checks_norm;  // a norm that is not finite skips the step
};

struct WindowFactors {
  double norm, clip_coef, factor;  // norm before clipping; factor of main gradients, with clip
  bool skip, found_inf;
};

ACCUMEXT_HOST_DEVICE inline WindowFactors window_factors(double norm, bool overflow,
                                                         const WindowNumbers& numbers,
                                                         const WindowRules& rules) {
  double relative = numbers.unit;
  if (rules.weighted) {
    const bool positive = numbers.weight > 0.0;
    relative = relative / (positive ? numbers.weight : 1.0) * (positive ? 1.0 : 0.0);
  }
  const double normaliser = relative / numbers.scale;
  double probe = nonfinite_probe(normaliser);
  if (rules.checks_norm) probe += nonfinite_probe(norm);
  const bool broken = overflow || !is_finite_probe(probe);
  if (!rules.normalised) norm = norm * normaliser;
  double clip_coef = 1.0;
  if (rules.clips) {
    clip_coef = rules.max_norm / (norm + 1e-6);
    if (clip_coef > 1.0) clip_coef = 1.0;
  }
  const bool anything = broken || numbers.found_inf != 0.0;
  const bool skip = rules.counted ? broken || numbers.finite == 0.0 : anything;
  return {norm, clip_coef, rules.clips ? normaliser * clip_coef : normaliser, skip, anything};
}

}  // namespace accumext
