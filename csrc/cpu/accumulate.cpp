#include "cpu/accumulate.h"

#include <torch/csrc/stable/library.h>

#include <functional>
#include <optional>
#include <vector>

namespace accumext::cpu {
namespace {

// main_grad = main_grad + grad * factor over one piece, the squares of the stored values, and
// whether each grad is finite.
//
//   reads   grad, grad_t, [end - begin]; main_grad unless overwrite
//   writes  main_grad, main_t, [end - begin]
template <typename main_t, typename grad_t>
Partial accumulate_piece(const Pair& pair, const Chunk& piece, double inv_scale, double clip_coef,
                         bool overwrite) {
  using acc_t = acc_type<main_t, grad_t>;
  using norm_t = acc_type<main_t>;
  using Squares = Norm<NormKind::kSquares>;
  main_t* main_grad = static_cast<main_t*>(pair.main_grad);
  const grad_t* grad = static_cast<const grad_t*>(pair.grad);
  const acc_t factor = scaled(static_cast<acc_t>(clip_coef), static_cast<acc_t>(inv_scale));
  const Squares norm{2.0};
  Lanes<norm_t> totals(0);
  Lanes<acc_t> probes(0);
  for_each_block(pair.layout, piece, [&](auto at, auto count) {
    acc_t updated[kLanes];
    for (int lane = 0; lane < count; ++lane) {
      const acc_t g = load<acc_t>(grad[at(1, lane)]);
      probes.lane[lane] += nonfinite_probe(g);
      updated[lane] = overwrite ? scaled(g, factor)
                                : accumulated(load<acc_t>(main_grad[at(0, lane)]), g, factor);
    }
    for (int lane = 0; lane < count; ++lane) {
      const main_t stored = rounded<main_t>(updated[lane]);
      main_grad[at(0, lane)] = stored;
      totals.lane[lane] += norm.term(load<norm_t>(stored));
    }
  });
  return {static_cast<double>(totals.folded(std::plus<norm_t>())),
          is_finite_probe(probes.folded(std::plus<acc_t>()))};
}

}  // namespace

Reduced accumulate(const std::vector<Pair>& pairs, double inv_scale, double clip_coef,
                   bool overwrite) {
  const Norm<NormKind::kSquares> norm{2.0};
  return reduce(norm, plan_chunks(numels(pairs)), [&](const Chunk& piece) {
    const Pair& pair = pairs[piece.tensor];
    return with_type(pair.main_dtype, [&](auto main_type) {
      return with_type(pair.grad_dtype, [&](auto grad_type) {
        return accumulate_piece<decltype(main_type), decltype(grad_type)>(pair, piece, inv_scale,
                                                                          clip_coef, overwrite);
      });
    });
  });
}

namespace {

template <typename scale_t>  // double or std::optional<Tensor>
Tensor accumulate_cpu(std::vector<Tensor> main_grads, std::vector<Tensor> grads, scale_t inv_scale,
                      std::optional<Tensor> found_inf, bool overwrite) {
  Arguments arguments;
  const std::vector<Pair> pairs = arguments.pairs(main_grads, grads);
  const Scalar unscale = arguments.scalar(inv_scale);
  float* flag = arguments.found_inf(found_inf);
  const Reduced result = accumulate(pairs, value(unscale), /*clip_coef=*/1.0, overwrite);
  return report(result, main_grads, flag);
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  using accumext::cpu::accumulate_cpu;
  m.impl("accumulate_", TORCH_BOX(&accumulate_cpu<std::optional<torch::stable::Tensor>>));
  m.impl("accumulate_.scalar", TORCH_BOX(&accumulate_cpu<double>));
}
