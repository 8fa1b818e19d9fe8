#include <optional>
#include <vector>

#include "cuda/accumulate.cuh"
#include "cuda/launch.h"

namespace accumext::cuda {

void launch_accumulate(const Call<2>& call, const Scalar& inv_scale, const Clip* clip,
                       bool overwrite, Partial* partials) {
  call.for_chunks(accumulate_kernel<kSmallTable>, accumulate_kernel<kLargeTable>, inv_scale, clip,
                  overwrite, partials);
}

namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor accumulate_cuda(TensorList main_grads, TensorList grads, scale_t inv_scale,
                       std::optional<Tensor> found_inf, bool overwrite) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(main_grads, grads);
  const Scalar unscale = arguments.scalar(inv_scale);
  float* flag = arguments.found_inf(found_inf);
  arguments.require_apart(pairs, unscale, flag);
  if (grads.size() == 0) return norm_of_nothing();

  const Call<2> call(pairs, arguments.device_index());
  Tensor norm = call.new_norm(pairs, &Pair::main_dtype);
  const Tensor memory = call.workspace(call.chunks() * sizeof(Partial));
  Partial* partials = static_cast<Partial*>(memory.data_ptr());
  launch_accumulate(call, unscale, /*clip=*/nullptr, overwrite, partials);
  call.finish(partials, Norm<NormKind::kSquares>{2.0}, outcome(norm, flag));
  return norm;
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  using accumext::boxed;
  using accumext::cuda::accumulate_cuda;
  m.impl("accumulate_", boxed<accumulate_cuda<std::optional<torch::stable::Tensor>>>);
  m.impl("accumulate_.scalar", boxed<accumulate_cuda<double>>);
}
