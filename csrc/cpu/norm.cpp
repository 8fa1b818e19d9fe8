#include "cpu/norm.h"

#include <optional>
#include <vector>

namespace accumext::cpu {
namespace {

template <NormKind kKind>
Reduced norm_of(const std::vector<Span>& grads, const Norm<kKind>& norm, double inv_scale) {
  const Kernels& inner = kernels();
  return reduce(norm, plan_chunks(numels(grads)), [&](const Chunk& chunk) {
    return inner.norm(grads[chunk.tensor], chunk, kKind, norm.p, inv_scale);
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

Tensor report(const Reduced& result, Dtype dtype, float* found_inf) {
  using torch::headeronly::ScalarType;
  if (found_inf != nullptr && !result.finite) *found_inf = 1.0f;
  const bool wide = dtype == Dtype::kDouble;
  Tensor norm = torch::stable::empty({}, wide ? ScalarType::Double : ScalarType::Float);
  if (wide) {
    *static_cast<double*>(norm.data_ptr()) = result.norm;
  } else {
    *static_cast<float*>(norm.data_ptr()) = static_cast<float>(result.norm);
  }
  return norm;
}

namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor total_norm_cpu(TensorList grads, double norm_type, scale_t inv_scale,
                      std::optional<Tensor> found_inf) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/false);
  const Scalar unscale = arguments.scalar(inv_scale);
  float* flag = arguments.found_inf(found_inf);
  arguments.require_apart(spans, unscale, flag);
  const double p = arguments.norm_type(norm_type);
  return report(cpu::norm_of(spans, p, value(unscale)), norm_dtype(spans, &Span::dtype), flag);
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  using accumext::boxed;
  using accumext::cpu::total_norm_cpu;
  m.impl("total_norm", boxed<total_norm_cpu<std::optional<torch::stable::Tensor>>>);
  m.impl("total_norm.scalar", boxed<total_norm_cpu<double>>);
}
