#include <vector>

#include "cuda/launch.h"
#include "cuda/scale.cuh"

namespace accumext::cuda {
namespace {

template <typename scale_t>  // double or Tensor
void scale_cuda(std::vector<Tensor> grads, scale_t factor) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/true);
  const Scalar multiplier = arguments.scalar(factor);
  if (grads.empty()) return;

  const torch::stable::accelerator::DeviceGuard guard(grads[0].get_device_index());
  const cudaStream_t stream = current_stream(grads[0].get_device_index());
  const DeviceTable<1> table(spans, grads[0], stream);
  if (table.blocks() == 0) return;
  scale_kernel<<<table.blocks(), kBlockSize, 0, stream>>>(table.table(), multiplier);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::cuda::scale_cuda;
  m.impl("scale_", TORCH_BOX(&scale_cuda<torch::stable::Tensor>));
  m.impl("scale_.scalar", TORCH_BOX(&scale_cuda<double>));
}
