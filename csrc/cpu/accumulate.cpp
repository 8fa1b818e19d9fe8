#include "cpu/accumulate.h"

#include <optional>
#include <vector>

namespace accumext::cpu {

Reduced accumulate(const std::vector<Pair>& pairs, double inv_scale, double clip_coef,
                   bool overwrite) {
  const Norm<NormKind::kSquares> norm{2.0};
  const Kernels& inner = kernels();
  const Accumulation how{inv_scale, clip_coef, overwrite, overwrite && is_large(pairs)};
  return reduce(norm, plan_chunks(numels(pairs)), [&](const Chunk& chunk) {
    return inner.accumulate(pairs[chunk.tensor], chunk, how);
  });
}

namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor accumulate_cpu(TensorList main_grads, TensorList grads, scale_t inv_scale,
                      std::optional<Tensor> found_inf, bool overwrite) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(main_grads, grads);
  const Scalar unscale = arguments.scalar(inv_scale);
  float* flag = arguments.found_inf(found_inf);
  arguments.require_apart(pairs, unscale, flag);
  const Reduced result = accumulate(pairs, value(unscale), /*clip_coef=*/1.0, overwrite);
  return report(result, norm_dtype(pairs, &Pair::main_dtype), flag);
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  using accumext::boxed;
  using accumext::cpu::accumulate_cpu;
  m.impl("accumulate_", boxed<accumulate_cpu<std::optional<torch::stable::Tensor>>>);
  m.impl("accumulate_.scalar", boxed<accumulate_cpu<double>>);
}
