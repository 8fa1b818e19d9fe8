#include <algorithm>
#include <optional>

#include "cuda/decoder/best_launch.h"
#include "cuda/decoder/head.h"

namespace accumext::cuda {
namespace {

// Two launches for every kMostBest words.
template <typename T>
void launch_best(const Queue& queue, Softmax<T> call, BestRows<T> rows, int64_t size) {
  Best<T> best{.size = static_cast<int>(std::min<int64_t>(size, kMostBest))};
  const Tensor memory = chunk_memory(queue, call, best);
  for (int64_t found = 0; found < size; found += kMostBest) {
    best.goes_on = found > 0;
    best.size = static_cast<int>(std::min<int64_t>(size - found, kMostBest));
    launch_chunks(queue, best_of_chunks_kernel<T>, kBestBlocks, call, best);
    queue.launch(best_of_rows_kernel<T>, call.tiles.rows, kBlockSize, call, best, rows);
    rows.logits.data = rows.logits.at(0, best.size);
    rows.tokens.data = rows.tokens.at(0, best.size);
  }
}

template <typename T>
void head_top(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
              int64_t logit_rows, const Tensor& logits, const Tensor& tokens, const Tensor& stats) {
  const Views views(hidden);
  require(hidden.dim() == 2 && weight.dim() == 2 && logits.dim() == 2 && logit_rows >= 1);
  const int64_t count = hidden.size(0);
  const int64_t size = logits.size(1);
  require(1 <= size && size <= weight.size(0));
  views.matrix<const T>(hidden, count, weight.size(1));
  const BestRows<T> all{.logits = views.matrix<T>(logits, count, size),
                        .tokens = views.matrix<int64_t>(tokens, count, size),
                        .stats = views.matrix<T>(stats, 2, count)};
  if (count == 0) return;
  const Queue queue(views.device_index());
  const int64_t most = std::min(logit_rows, count);
  LogitsProduct<T> product(queue, views, weight, bias, most, /*along_rows=*/true);
  const Tensor operand = rounded_like(queue, hidden, weight);
  for (int64_t first = 0; first < count; first += most) {
    Softmax<T> call{};
    static_cast<Logits<T>&>(call) = product.of(operand, first, std::min(most, count - first), {});
    BestRows<T> rows{all.logits.from_row(first), all.tokens.from_row(first), all.stats};
    rows.stats.data = all.stats.at(0, first);
    launch_best(queue, call, rows, size);
  }
}

void head_top_cuda(Tensor hidden, Tensor weight, std::optional<Tensor> bias, int64_t logit_rows,
                   Tensor logits, Tensor tokens, Tensor stats) {
  const auto run = [&](auto type) {
    head_top<decltype(type)>(hidden, weight, bias, logit_rows, logits, tokens, stats);
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("head_top", accumext::boxed<accumext::cuda::head_top_cuda>);
}
