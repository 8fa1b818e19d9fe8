#include <vector>

#include "cuda/launch.h"
#include "cuda/scale.cuh"

namespace accumext::cuda {
namespace {

template <typename scale_t>  // double or Tensor
void scale_cuda(TensorList grads, scale_t factor) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/true);
  const Scalar multiplier = arguments.scalar(factor);
  if (grads.size() == 0) return;
  Call<1>(spans, arguments.device_index()).for_chunks(scale_kernel, multiplier);
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::boxed;
  using accumext::cuda::scale_cuda;
  m.impl("scale_", boxed<scale_cuda<torch::stable::Tensor>>);
  m.impl("scale_.scalar", boxed<scale_cuda<double>>);
}
