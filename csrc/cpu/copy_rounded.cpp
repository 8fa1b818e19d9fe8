#include <optional>
#include <vector>

#include "common/arguments.h"
#include "cpu/loops.h"

namespace accumext::cpu {
namespace {

void copy_rounded_cpu(TensorList targets, TensorList sources, std::optional<Tensor> seed,
                      std::optional<Tensor> found_inf) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(targets, sources);
  const Rounding how{arguments.seed(seed), is_large(pairs)};
  const float* flag = arguments.found_inf(found_inf);
  arguments.require_apart(pairs, how.seed, flag);
  if (flag != nullptr && *flag != 0.0f) return;
  std::vector<NumberedPair> numbered;
  if (how.seed != nullptr) numbered = Arguments::numbered(pairs, targets, sources);
  const Kernels& inner = kernels();
  const Layout<3> none;
  for_each_chunk(plan_chunks(numels(pairs)), [&](const Chunk& chunk, int64_t) {
    const Layout<3>& layout = numbered.empty() ? none : numbered[chunk.tensor].layout;
    inner.copy_rounded(pairs[chunk.tensor], layout, chunk, how);
  });
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("copy_rounded_", accumext::boxed<accumext::cpu::copy_rounded_cpu>);
}
