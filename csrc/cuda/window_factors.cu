// window_factors: the norm of the sums and all that follows from it, in two launches, or in one if
// the norm is given.
#include <optional>
#include <vector>

#include "common/window_factors.h"
#include "cuda/launch.h"
#include "cuda/window_factors.cuh"

namespace accumext::cuda {
namespace {

void window_factors_cuda(Tensor numbers, Tensor flags, TensorList sums,
                         std::vector<std::optional<Tensor>> tensors, double base_weight,
                         std::optional<double> max_norm, bool normalised, bool checks_norm) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(sums, /*written=*/false);
  const WindowLedger ledger(tensors);
  const Closing closing{
      .window = ledger.numbers(arguments, base_weight),
      .rules = ledger.rules(max_norm, normalised, checks_norm),
      .numbers = three<double>(arguments, numbers, Dtype::kDouble),
      .flags = three<float>(arguments, flags, Dtype::kFloat),
  };
  if (ledger.has(WindowLedger::kNorm)) {
    const Scalar known = ledger.number(arguments, WindowLedger::kNorm, 0.0);
    return Queue(arguments.device_index()).launch(close_window_kernel, 1, 1, known, closing);
  }
  const Call<1> call(spans, arguments.device_index());
  launch_norm(call, 2.0, Scalar{},
              {.norm_dtype = norm_dtype(spans, &Span::dtype), .closing = closing});
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("window_factors", accumext::boxed<accumext::cuda::window_factors_cuda>);
}
