// window_factors: the norm of the sums, unless it is given, and all that follows from it.
#include "math/window_factors.h"

#include <optional>
#include <vector>

#include "cpu/norm.h"

namespace accumext::cpu {
namespace {

// The number in a tensor, or the given one if there is no tensor.
double number(Arguments& arguments, const std::optional<Tensor>& tensor, double otherwise) {
  return tensor ? value(arguments.scalar(tensor)) : otherwise;
}

template <typename T>
T* three(Arguments& arguments, const Tensor& tensor, Dtype dtype) {
  require(arguments.dense_float(tensor) == dtype);
  require(tensor.dim() == 1 && tensor.size(0) == 3 && tensor.is_contiguous());
  return static_cast<T*>(tensor.data_ptr());
}

void window_factors_cpu(Tensor numbers, Tensor flags, TensorList sums, std::optional<Tensor> norm,
                        double unit, std::optional<Tensor> device_unit,
                        std::optional<Tensor> weight, std::optional<Tensor> scale,
                        std::optional<double> max_norm, bool normalised, bool checks_norm,
                        std::optional<Tensor> overflow, std::optional<Tensor> found_inf,
                        std::optional<Tensor> finite) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(sums, /*written=*/false);
  const WindowNumbers given{.unit = number(arguments, device_unit, unit),
                            .weight = number(arguments, weight, 1.0),
                            .scale = number(arguments, scale, 1.0),
                            .found_inf = number(arguments, found_inf, 0.0),
                            .finite = number(arguments, finite, 1.0)};
  const WindowRules rules{.max_norm = max_norm.value_or(0.0),
                          .clips = max_norm.has_value(),
                          .weighted = weight.has_value(),
                          .counted = finite.has_value(),
                          .normalised = normalised,
                          .checks_norm = checks_norm};
  Reduced found{.norm = number(arguments, norm, 0.0),
                .finite = number(arguments, overflow, 0.0) == 0.0};
  if (!norm) {
    found = norm_of(spans, 2.0, 1.0);
    // Rounded as total_norm returns it.
    if (norm_dtype(spans, &Span::dtype) == Dtype::kFloat) {
      found.norm = static_cast<float>(found.norm);
    }
  }
  const WindowFactors factors = window_factors(found.norm, !found.finite, given, rules);
  double* out = three<double>(arguments, numbers, Dtype::kDouble);
  out[0] = factors.norm;
  out[1] = factors.clip_coef;
  out[2] = factors.factor;
  float* set = three<float>(arguments, flags, Dtype::kFloat);
  set[0] = static_cast<float>(1.0 / factors.factor);
  set[1] = factors.skip ? 1.0f : 0.0f;
  set[2] = factors.found_inf ? 1.0f : 0.0f;
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("window_factors", accumext::boxed<accumext::cpu::window_factors_cpu>);
}
