// unscale_check_clip_accumulate_: the norm of a micro-batch first, then its accumulation.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "cpu/accumulate.h"
#include "cpu/norm.h"
#include "math/norm.h"

namespace accumext::cpu {
namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor clip_accumulate_cpu(std::vector<Tensor> main_grads, std::vector<Tensor> grads,
                           scale_t inv_scale, double max_norm, double norm_type,
                           std::optional<Tensor> found_inf, bool overwrite, bool if_finite) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(main_grads, grads);
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/false);
  const double unscale = value(arguments.scalar(inv_scale));
  const double limit = arguments.max_norm(max_norm);
  const double p = arguments.norm_type(norm_type);
  float* flag = arguments.found_inf(found_inf);

  const Reduced incoming = norm_of(spans, p, unscale);
  Tensor norm = report(incoming, grads, flag);
  if (if_finite && !incoming.finite) return norm;
  const double coef = float_dtype(norm) == Dtype::kDouble
                          ? clip_coef(incoming.norm, limit)
                          : clip_coef(static_cast<float>(incoming.norm), static_cast<float>(limit));
  accumulate(pairs, unscale, coef, overwrite);
  return norm;
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  using accumext::cpu::clip_accumulate_cpu;
  using TensorScale = std::optional<torch::stable::Tensor>;
  m.impl("unscale_check_clip_accumulate_", TORCH_BOX(&clip_accumulate_cpu<TensorScale>));
  m.impl("unscale_check_clip_accumulate_.scalar", TORCH_BOX(&clip_accumulate_cpu<double>));
}
