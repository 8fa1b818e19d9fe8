// unscale_check_clip_accumulate_: the norm of a micro-batch first, then its accumulation, in three
// launches. The clip passes from one kernel to the next in device memory.
#include <optional>
#include <vector>

#include "cuda/launch.h"

namespace accumext::cuda {
namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor clip_accumulate_cuda(TensorList main_grads, TensorList grads, scale_t inv_scale,
                            double max_norm, double norm_type, std::optional<Tensor> found_inf,
                            bool overwrite, bool if_finite) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(main_grads, grads);
  std::vector<Span> spans;
  spans.reserve(pairs.size());
  for (const Pair& pair : pairs) spans.push_back(grad_of(pair));
  const Scalar unscale = arguments.scalar(inv_scale);
  const double limit = arguments.max_norm(max_norm);
  const double p = arguments.norm_type(norm_type);
  float* flag = arguments.found_inf(found_inf);
  arguments.require_apart(pairs, unscale, flag);
  if (grads.size() == 0) return norm_of_nothing();

  const Call<1> incoming(spans, arguments.device_index());
  const Call<2> call(pairs, arguments.device_index());
  Tensor norm = incoming.new_norm(spans, &Span::dtype);
  const Tensor memory = call.workspace(sizeof(Clip));
  Clip* clip = static_cast<Clip*>(memory.data_ptr());
  Outcome after = outcome(norm, flag);
  after.clip = clip;
  after.max_norm = limit;
  after.if_finite = if_finite;
  launch_norm(incoming, p, unscale, after);
  launch_accumulate(call, unscale, clip, overwrite, /*partials=*/nullptr);
  return norm;
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::boxed;
  using accumext::cuda::clip_accumulate_cuda;
  using TensorScale = std::optional<torch::stable::Tensor>;
  m.impl("unscale_check_clip_accumulate_", boxed<clip_accumulate_cuda<TensorScale>>);
  m.impl("unscale_check_clip_accumulate_.scalar", boxed<clip_accumulate_cuda<double>>);
}
