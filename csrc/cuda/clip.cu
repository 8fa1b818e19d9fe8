// unscale_check_clip_accumulate_: the norm of a micro-batch first, then its accumulation. The clip
// passes from one kernel to the next in device memory.
#include <optional>
#include <vector>

#include "cuda/launch.h"

namespace accumext::cuda {
namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor clip_accumulate_cuda(std::vector<Tensor> main_grads, std::vector<Tensor> grads,
                            scale_t inv_scale, double max_norm, double norm_type,
                            std::optional<Tensor> found_inf, bool overwrite, bool if_finite) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(main_grads, grads);
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/false);
  const Scalar unscale = arguments.scalar(inv_scale);
  const double limit = arguments.max_norm(max_norm);
  const double p = arguments.norm_type(norm_type);
  float* flag = arguments.found_inf(found_inf);
  Tensor norm = norm_result(grads);
  if (grads.empty()) return norm;

  const torch::stable::accelerator::DeviceGuard guard(grads[0].get_device_index());
  const cudaStream_t stream = current_stream(grads[0].get_device_index());
  const Tensor clip_memory = device_bytes(grads[0], sizeof(Clip));
  Clip* clip = static_cast<Clip*>(clip_memory.data_ptr());
  Outcome after = outcome(norm, flag);
  after.clip = clip;
  after.max_norm = limit;
  after.if_finite = if_finite;
  launch_norm(DeviceTable<1>(spans, grads[0], stream), p, unscale, grads[0], after, stream);

  const DeviceTable<2> table(pairs, grads[0], stream);
  const Tensor partials = new_partials(table, grads[0]);
  launch_accumulate(table, unscale, clip, overwrite, static_cast<Partial*>(partials.data_ptr()),
                    stream);
  return norm;
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::cuda::clip_accumulate_cuda;
  using TensorScale = std::optional<torch::stable::Tensor>;
  m.impl("unscale_check_clip_accumulate_", TORCH_BOX(&clip_accumulate_cuda<TensorScale>));
  m.impl("unscale_check_clip_accumulate_.scalar", TORCH_BOX(&clip_accumulate_cuda<double>));
}
