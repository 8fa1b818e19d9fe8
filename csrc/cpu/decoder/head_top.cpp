#include "cpu/decoder/head_forward.h"

namespace accumext::cpu {
namespace {

template <typename T>
void head_top(Team& team, const Tensor& hidden, const Tensor& weight,
              const std::optional<Tensor>& bias, int64_t logit_rows, const Tensor& logits,
              const Tensor& tokens, const Tensor& stats) {
  const int64_t count = hidden.size(0);
  require(weight.dim() == 2 && weight.size(1) == hidden.size(1) && weight.size(0) > 0);
  require(!bias || bias->numel() == weight.size(0));
  require(logits.dim() == 2 && logits.size(0) == count);
  const int64_t size = logits.size(1);
  require(1 <= size && size <= weight.size(0));
  require(tokens.numel() == logits.numel() && stats.numel() == 2 * count);
  require(logit_rows >= 1);
  if (count == 0) return;
  const int64_t piece = std::min({logit_rows, kMaxLogitRows, count});
  Head<T> head(team, weight, elements<T>(bias), piece, /*temperature=*/1.0, kDtypeOf<T>, 0);
  T* stat = elements<T>(stats);
  for_each_piece<T>(hidden, piece, [&](int64_t first, int64_t rows, const T* columns) {
    head.largest(columns, padded(rows),
                 {.count = rows,
                  .size = size,
                  .logits = elements<T>(logits) + first * size,
                  .tokens = integers(tokens) + first * size,
                  .peak = stat + first,
                  .total = stat + count + first});
  });
}

void head_top_cpu(Tensor hidden, Tensor weight, std::optional<Tensor> bias, int64_t logit_rows,
                  Tensor logits, Tensor tokens, Tensor stats) {
  const auto run = [&](auto type) {
    Team::gather(most_threads(weight), [&](Team& team) {
      head_top<decltype(type)>(team, hidden, weight, bias, logit_rows, logits, tokens, stats);
    });
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("head_top", accumext::boxed<accumext::cpu::head_top_cpu>);
}
