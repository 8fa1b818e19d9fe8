#include <optional>
#include <vector>

#include "cuda/accumulate.cuh"
#include "cuda/launch.h"

namespace accumext::cuda {

void launch_accumulate(const DeviceTable<2>& pairs, const Scalar& inv_scale, const Clip* clip,
                       bool overwrite, Partial* partials, cudaStream_t stream) {
  if (pairs.blocks() == 0) return;
  accumulate_kernel<<<pairs.blocks(), kBlockSize, 0, stream>>>(pairs.table(), inv_scale, clip,
                                                               overwrite, partials);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor accumulate_cuda(std::vector<Tensor> main_grads, std::vector<Tensor> grads, scale_t inv_scale,
                       std::optional<Tensor> found_inf, bool overwrite) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(main_grads, grads);
  const Scalar unscale = arguments.scalar(inv_scale);
  float* flag = arguments.found_inf(found_inf);
  Tensor norm = norm_result(main_grads);
  if (grads.empty()) return norm;

  const torch::stable::accelerator::DeviceGuard guard(grads[0].get_device_index());
  const cudaStream_t stream = current_stream(grads[0].get_device_index());
  const DeviceTable<2> table(pairs, grads[0], stream);
  const Tensor memory = new_partials(table, grads[0]);
  Partial* partials = static_cast<Partial*>(memory.data_ptr());
  launch_accumulate(table, unscale, /*clip=*/nullptr, overwrite, partials, stream);
  finish_kernel<<<1, kBlockSize, 0, stream>>>(partials, table.blocks(),
                                              Norm<NormKind::kSquares>{2.0}, outcome(norm, flag));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return norm;
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::cuda::accumulate_cuda;
  m.impl("accumulate_", TORCH_BOX(&accumulate_cuda<std::optional<torch::stable::Tensor>>));
  m.impl("accumulate_.scalar", TORCH_BOX(&accumulate_cuda<double>));
}
