#include <vector>

#include "common/arguments.h"
#include "cpu/loops.h"

namespace accumext::cpu {
namespace {

void scale(const std::vector<Span>& spans, double factor) {
  const Kernels& inner = kernels();
  for_each_chunk(plan_chunks(numels(spans)), [&](const Chunk& chunk, int64_t) {
    inner.scale(spans[chunk.tensor], chunk, factor);
  });
}

template <typename scale_t>  // double or Tensor
void scale_cpu(TensorList grads, scale_t factor) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/true);
  const Scalar multiplier = arguments.scalar(factor);
  arguments.require_apart(spans, multiplier);
  if (value(multiplier) == 1.0) return;
  if (share_memory(spans)) {  // one after the other
    for (const Span& span : spans) scale({span}, value(multiplier));
  } else {
    scale(spans, value(multiplier));
  }
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  using accumext::boxed;
  using accumext::cpu::scale_cpu;
  m.impl("scale_", boxed<scale_cpu<torch::stable::Tensor>>);
  m.impl("scale_.scalar", boxed<scale_cpu<double>>);
}
