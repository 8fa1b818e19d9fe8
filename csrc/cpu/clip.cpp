// unscale_check_clip_accumulate_: the norm of a micro-batch first, then its accumulation.
#include <optional>
#include <vector>

#include "cpu/accumulate.h"
#include "cpu/norm.h"
#include "math/norm.h"

namespace accumext::cpu {
namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor clip_accumulate_cpu(TensorList main_grads, TensorList grads, scale_t inv_scale,
                           double max_norm, double norm_type, std::optional<Tensor> found_inf,
                           bool overwrite, bool if_finite) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(main_grads, grads);
  std::vector<Span> spans;
  spans.reserve(pairs.size());
  for (const Pair& pair : pairs) spans.push_back(grad_of(pair));
  const Scalar unscale = arguments.scalar(inv_scale);
  const double limit = arguments.max_norm(max_norm);
  const double p = arguments.norm_type(norm_type);
  float* flag = arguments.found_inf(found_inf);
  arguments.require_apart(pairs, unscale, flag);

  const Reduced incoming = norm_of(spans, p, value(unscale));
  const Dtype dtype = norm_dtype(spans, &Span::dtype);
  const Tensor norm = report(incoming, dtype, flag);
  if (if_finite && !incoming.finite) return norm;
  const double coef = dtype == Dtype::kDouble
                          ? clip_coef(incoming.norm, limit)
                          : clip_coef(static_cast<float>(incoming.norm), static_cast<float>(limit));
  accumulate(pairs, value(unscale), coef, overwrite);
  return norm;
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  using accumext::boxed;
  using accumext::cpu::clip_accumulate_cpu;
  using TensorScale = std::optional<torch::stable::Tensor>;
  m.impl("unscale_check_clip_accumulate_", boxed<clip_accumulate_cpu<TensorScale>>);
  m.impl("unscale_check_clip_accumulate_.scalar", boxed<clip_accumulate_cpu<double>>);
}
