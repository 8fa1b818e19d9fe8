#include <optional>
#include <vector>

#include "cuda/launch.h"
#include "cuda/norm.cuh"

namespace accumext::cuda {
namespace {

template <NormKind kKind>
void launch(const Call<1>& call, const Norm<kKind>& norm, const Scalar& inv_scale,
            const Outcome& outcome) {
  const Tensor memory = call.workspace(call.chunks() * sizeof(Partial));
  Partial* partials = static_cast<Partial*>(memory.data_ptr());
  call.for_chunks(norm_kernel<kKind, kSmallTable>, norm_kernel<kKind, kLargeTable>, norm, inv_scale,
                  partials);
  call.finish(partials, norm, outcome);
}

}  // namespace

void launch_norm(const Call<1>& call, double p, const Scalar& inv_scale, const Outcome& outcome) {
  switch (norm_kind(p)) {
    case NormKind::kAbs:
      return launch(call, Norm<NormKind::kAbs>{p}, inv_scale, outcome);
    case NormKind::kSquares:
      return launch(call, Norm<NormKind::kSquares>{p}, inv_scale, outcome);
    case NormKind::kMax:
      return launch(call, Norm<NormKind::kMax>{p}, inv_scale, outcome);
    case NormKind::kMin:
      return launch(call, Norm<NormKind::kMin>{p}, inv_scale, outcome);
    default:
      return launch(call, Norm<NormKind::kPowers>{p}, inv_scale, outcome);
  }
}

namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor total_norm_cuda(TensorList grads, double norm_type, scale_t inv_scale,
                       std::optional<Tensor> found_inf) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/false);
  const Scalar unscale = arguments.scalar(inv_scale);
  float* flag = arguments.found_inf(found_inf);
  arguments.require_apart(spans, unscale, flag);
  const double p = arguments.norm_type(norm_type);
  if (grads.size() == 0) return norm_of_nothing();

  const Call<1> call(spans, arguments.device_index());
  Tensor norm = call.new_norm(spans, &Span::dtype);
  launch_norm(call, p, unscale, outcome(norm, flag));
  return norm;
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::boxed;
  using accumext::cuda::total_norm_cuda;
  m.impl("total_norm", boxed<total_norm_cuda<std::optional<torch::stable::Tensor>>>);
  m.impl("total_norm.scalar", boxed<total_norm_cuda<double>>);
}
