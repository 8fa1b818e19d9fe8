#include <torch/csrc/stable/library.h>

#include <vector>

#include "arguments.h"
#include "cpu/loops.h"
#include "math/accumulate.h"

namespace accumext::cpu {
namespace {

// grad = grad * factor over one chunk.
//
//   reads and writes  grad, scalar_t, [end - begin]
template <typename scalar_t>
void scale_chunk(const Span& span, const Chunk& chunk, double factor) {
  using acc_t = acc_type<scalar_t>;
  scalar_t* grad = static_cast<scalar_t*>(span.data);
  for_each_block(span.layout, chunk, [&](auto at, auto count) {
    for (int lane = 0; lane < count; ++lane) {
      scalar_t& x = grad[at(0, lane)];
      x = rounded<scalar_t>(scaled(load<acc_t>(x), static_cast<acc_t>(factor)));
    }
  });
}

template <typename scale_t>  // double or Tensor
void scale_cpu(std::vector<Tensor> grads, scale_t factor) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(grads, /*written=*/true);
  const double multiplier = value(arguments.scalar(factor));
  if (multiplier == 1.0) return;
  for_each_chunk(plan_chunks(numels(spans)), [&](const Chunk& chunk, int64_t) {
    const Span& span = spans[chunk.tensor];
    with_type(span.dtype, [&](auto type) { scale_chunk<decltype(type)>(span, chunk, multiplier); });
  });
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  using accumext::cpu::scale_cpu;
  m.impl("scale_", TORCH_BOX(&scale_cpu<torch::stable::Tensor>));
  m.impl("scale_.scalar", TORCH_BOX(&scale_cpu<double>));
}
