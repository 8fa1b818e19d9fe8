#include "cpu/norm.h"

#include <torch/csrc/stable/library.h>

#include <functional>
#include <optional>
#include <vector>

namespace accumext::cpu {
namespace {

// The terms of |grad * inv_scale| over one piece, and whether each grad is finite.
//
//   reads   grad, scalar_t, [end - begin]
template <typename scalar_t, NormKind kKind>
Partial norm_piece(const Span& span, const Chunk& piece, const Norm<kKind>& norm,
                   double inv_scale) {
  using acc_t = acc_type<scalar_t>;
  const scalar_t* grad = static_cast<const scalar_t*>(span.data);
  const acc_t factor = static_cast<acc_t>(inv_scale);
  Lanes<acc_t> totals(norm.template identity<acc_t>());
  Lanes<acc_t> probes(0);
  for_each_block(span.layout, piece, [&](auto at, auto count) {
    for (int lane = 0; lane < count; ++lane) {
      const acc_t x = load<acc_t>(grad[at(0, lane)]);
      probes.lane[lane] += nonfinite_probe(x);
      totals.lane[lane] = norm.combine(totals.lane[lane], norm.term(scaled(x, factor)));
    }
  });
  const acc_t total = totals.folded([](acc_t a, acc_t b) { return Norm<kKind>::combine(a, b); });
  return {static_cast<double>(total), is_finite_probe(probes.folded(std::plus<acc_t>()))};
}

template <NormKind kKind>
Reduced norm_of(const std::vector<Span>& grads, const Norm<kKind>& norm, double inv_scale) {
  return reduce(norm, plan_chunks(numels(grads)), [&](const Chunk& piece) {
    const Span& span = grads[piece.tensor];
    return with_type(span.dtype, [&](auto type) {
      return norm_piece<decltype(type)>(span, piece, norm, inv_scale);
    });
  });
}

}  // namespace

Reduced norm_of(const std::vector<Span>& grads, double p, double inv_scale) {
  switch (norm_kind(p)) {
    case NormKind::kAbs:
      return norm_of(grads, Norm<NormKind::kAbs>{p}, inv_scale);
    case NormKind::kSquares:
      return norm_of(grads, Norm<NormKind::kSquares>{p}, inv_scale);
    case NormKind::kMax:
      return norm_of(grads, Norm<NormKind::kMax>{p}, inv_scale);
    case NormKind::kMin:
      return norm_of(grads, Norm<NormKind::kMin>{p}, inv_scale);
    default:
      return norm_of(grads, Norm<NormKind::kPowers>{p}, inv_scale);
  }
}

Tensor report(const Reduced& result, const std::vector<Tensor>& tensors, float* found_inf) {
  if (found_inf != nullptr && !result.finite) *found_inf = 1.0f;
  Tensor norm = norm_result(tensors);
  with_type(float_dtype(norm), [&](auto type) {
    *static_cast<decltype(type)*>(norm.data_ptr()) = rounded<decltype(type)>(result.norm);
  });
  return norm;
}

namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor total_norm_cpu(std::vector<Tensor> grads, double norm_type, scale_t inv_scale,
                      std::optional<Tensor> found_inf) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/false);
  const Scalar unscale = arguments.scalar(inv_scale);
  float* flag = arguments.found_inf(found_inf);
  const double p = arguments.norm_type(norm_type);
  return report(cpu::norm_of(spans, p, value(unscale)), grads, flag);
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  using accumext::cpu::total_norm_cpu;
  m.impl("total_norm", TORCH_BOX(&total_norm_cpu<std::optional<torch::stable::Tensor>>));
  m.impl("total_norm.scalar", TORCH_BOX(&total_norm_cpu<double>));
}
