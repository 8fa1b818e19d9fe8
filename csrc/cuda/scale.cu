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
  arguments.require_apart(spans, multiplier);
  if (grads.size() == 0) return;
  const auto scale = [&](const std::vector<Span>& some) {
    Call<1>(some, arguments.device_index())
        .for_chunks(scale_kernel<kSmallTable>, scale_kernel<kLargeTable>, multiplier);
  };
  if (share_memory(spans)) {  // one after the other
    for (const Span& span : spans) scale({span});
  } else {
    scale(spans);
  }
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::boxed;
  using accumext::cuda::scale_cuda;
  m.impl("scale_", boxed<scale_cuda<torch::stable::Tensor>>);
  m.impl("scale_.scalar", boxed<scale_cuda<double>>);
}
