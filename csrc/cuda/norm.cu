#include <optional>
#include <vector>

#include "cuda/launch.h"
#include "cuda/norm.cuh"

namespace accumext::cuda {
namespace {

template <NormKind kKind>
void launch(const DeviceTable<1>& grads, const Norm<kKind>& norm, const Scalar& inv_scale,
            const Tensor& like, const Outcome& outcome, cudaStream_t stream) {
  const Tensor memory = new_partials(grads, like);
  Partial* partials = static_cast<Partial*>(memory.data_ptr());
  if (grads.blocks() > 0) {
    norm_kernel<<<grads.blocks(), kBlockSize, 0, stream>>>(grads.table(), norm, inv_scale,
                                                           partials);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  finish_kernel<<<1, kBlockSize, 0, stream>>>(partials, grads.blocks(), norm, outcome);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void launch_norm(const DeviceTable<1>& grads, double p, const Scalar& inv_scale, const Tensor& like,
                 const Outcome& outcome, cudaStream_t stream) {
  switch (norm_kind(p)) {
    case NormKind::kAbs:
      return launch(grads, Norm<NormKind::kAbs>{p}, inv_scale, like, outcome, stream);
    case NormKind::kSquares:
      return launch(grads, Norm<NormKind::kSquares>{p}, inv_scale, like, outcome, stream);
    case NormKind::kMax:
      return launch(grads, Norm<NormKind::kMax>{p}, inv_scale, like, outcome, stream);
    case NormKind::kMin:
      return launch(grads, Norm<NormKind::kMin>{p}, inv_scale, like, outcome, stream);
    default:
      return launch(grads, Norm<NormKind::kPowers>{p}, inv_scale, like, outcome, stream);
  }
}

namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor total_norm_cuda(std::vector<Tensor> grads, double norm_type, scale_t inv_scale,
                       std::optional<Tensor> found_inf) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/false);
  const Scalar unscale = arguments.scalar(inv_scale);
  float* flag = arguments.found_inf(found_inf);
  const double p = arguments.norm_type(norm_type);
  Tensor norm = norm_result(grads);
  if (grads.empty()) return norm;

  const torch::stable::accelerator::DeviceGuard guard(grads[0].get_device_index());
  const cudaStream_t stream = current_stream(grads[0].get_device_index());
  const DeviceTable<1> table(spans, grads[0], stream);
  launch_norm(table, p, unscale, grads[0], outcome(norm, flag), stream);
  return norm;
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::cuda::total_norm_cuda;
  m.impl("total_norm", TORCH_BOX(&total_norm_cuda<std::optional<torch::stable::Tensor>>));
  m.impl("total_norm.scalar", TORCH_BOX(&total_norm_cuda<double>));
}
