#include "cpu/decoder/head_forward.h"

namespace accumext::cpu {
namespace {

template <typename T>
void head_top(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
              int64_t logit_rows, const Tensor& logits, const Tensor& tokens, const Tensor& stats) {
  const int64_t count = hidden.size(0);
  const int64_t depth = hidden.size(1);
  const T* h = elements<T>(hidden);
  require(weight.dim() == 2 && weight.size(1) == depth && weight.size(0) > 0);
  require(!bias || bias->numel() == weight.size(0));
  require(logits.dim() == 2 && logits.size(0) == count);
  const int64_t size = logits.size(1);
  require(1 <= size && size <= weight.size(0));
  require(tokens.numel() == logits.numel() && stats.numel() == 2 * count);
  require(logit_rows >= 1);
  if (count == 0) return;
  const int64_t piece = std::min({logit_rows, kMaxLogitRows, count});
  Head<T> head(weight, elements<T>(bias), piece, /*temperature=*/1.0, kDtypeOf<T>, 0);
  T* stat = elements<T>(stats);
  const Buffer<T> columns(depth * padded(piece));
  for (int64_t done = 0; done < count; done += piece) {
    const int64_t rows = std::min(piece, count - done);
    transpose(h + done * depth, rows, depth, columns);
    head.largest(columns.get(), padded(rows),
                 {.count = rows,
                  .size = size,
                  .logits = elements<T>(logits) + done * size,
                  .tokens = integers(tokens) + done * size,
                  .peak = stat + done,
                  .total = stat + count + done});
  }
}

void head_top_cpu(Tensor hidden, Tensor weight, std::optional<Tensor> bias, int64_t logit_rows,
                  Tensor logits, Tensor tokens, Tensor stats) {
  const auto run = [&](auto type) {
    head_top<decltype(type)>(hidden, weight, bias, logit_rows, logits, tokens, stats);
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("head_top", accumext::boxed<accumext::cpu::head_top_cpu>);
}
