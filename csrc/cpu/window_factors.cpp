// window_factors: the norm of the sums, unless it is given, and all that follows from it.
#include "math/window_factors.h"

#include <optional>
#include <vector>

#include "common/window_factors.h"
#include "cpu/norm.h"

namespace accumext::cpu {
namespace {

void window_factors_cpu(Tensor numbers, Tensor flags, TensorList sums,
                        std::vector<std::optional<Tensor>> tensors, double base_weight,
                        std::optional<double> max_norm, bool normalised, bool checks_norm) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(sums, /*written=*/false);
  const WindowLedger ledger(tensors);
  const WindowNumbers<Scalar> held = ledger.numbers(arguments, base_weight);
  Reduced found{.norm = value(ledger.number(arguments, WindowLedger::kNorm, 0.0)), .finite = true};
  if (!ledger.has(WindowLedger::kNorm)) {
    found = norm_of(spans, 2.0, 1.0);
    // Rounded as total_norm returns it.
    if (norm_dtype(spans, &Span::dtype) == Dtype::kFloat) {
      found.norm = static_cast<float>(found.norm);
    }
  }
  window_factors(found.norm, found.finite,
                 {value(held.base_weight), value(held.weight), value(held.scale),
                  value(held.overflow), value(held.found_inf), value(held.counted)},
                 ledger.rules(max_norm, normalised, checks_norm))
      .write(three<double>(arguments, numbers, Dtype::kDouble),
             three<float>(arguments, flags, Dtype::kFloat));
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("window_factors", accumext::boxed<accumext::cpu::window_factors_cpu>);
}
