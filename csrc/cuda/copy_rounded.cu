#include <optional>
#include <vector>

#include "cuda/copy_rounded.cuh"
#include "cuda/launch.h"

namespace accumext::cuda {
namespace {

void copy_rounded_cuda(TensorList targets, TensorList sources, std::optional<Tensor> seed,
                       std::optional<Tensor> found_inf) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(targets, sources);
  const int64_t* key = arguments.seed(seed);
  const float* flag = arguments.found_inf(found_inf);
  arguments.require_apart(pairs, key, flag);
  if (targets.size() == 0) return;
  const int32_t device = arguments.device_index();
  if (key == nullptr) {
    Call<2>(pairs, device, kSmallTable).for_chunks(copy_rounded_kernel<2>, key, flag);
  } else {
    const std::vector<NumberedPair> numbered = Arguments::numbered(pairs, targets, sources);
    Call<3>(numbered, device, kSmallTable).for_chunks(copy_rounded_kernel<3>, key, flag);
  }
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("copy_rounded_", accumext::boxed<accumext::cuda::copy_rounded_cuda>);
}
