#include <optional>

#include "cuda/decoder/clear_tokens.cuh"
#include "cuda/decoder/head.h"

namespace accumext::cuda {
namespace {

// As many blocks as the device holds at once, or as there are tiles.
template <typename T, int kCount>
void launch(const Queue& queue, const Softmax<T>& call, const Rows<T>& rows,
            const FeedBack& feed_back) {
  const int64_t bands = call.tiles.bands();
  const int64_t resident = kSoftmaxBlocks * queue.multiprocessors();
  const int64_t slots = std::min(call.tiles.chunks(), (resident + bands - 1) / bands);
  const int64_t writers = rows.exps.data == nullptr ? 0 : slots;
  queue.launch(softmax_chunks_kernel<T, kCount>, bands * slots, kBlockSize, call);
  queue.launch(softmax_rows_kernel<T, kCount>, bands * (1 + writers), kBlockSize, call, rows,
               feed_back);
  if (rows.targets.data != nullptr || rows.exps.data == nullptr) return;
  const Column<const int64_t> tokens{rows.tokens.data, rows.tokens.stride};
  queue.launch(clear_tokens_kernel, (call.tiles.rows + kBlockSize - 1) / kBlockSize, kBlockSize,
               rows.exps, tokens, call.tiles.rows, call.tiles.columns);
}

template <typename T>
void head_forward(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& targets, const std::optional<Tensor>& uniforms,
                  double temperature, const std::optional<Tensor>& exps, int64_t logit_rows,
                  const Tensor& tokens, const Tensor& stats) {
  const Views views(hidden);
  require(hidden.dim() == 2 && weight.dim() == 2 && logit_rows >= 1);
  const int64_t count = hidden.size(0);
  const int64_t vocabulary = weight.size(0);
  views.matrix<const T>(hidden, count, weight.size(1));
  const Rows<T> rows{.targets = views.column<const int64_t>(targets, count),
                     .uniforms = views.column<const double>(uniforms, count),
                     .exps = views.any_matrix(exps, count, vocabulary),
                     .tokens = views.column<int64_t>(tokens, count),
                     .stats = views.matrix<T>(stats, 3, count)};
  if (count == 0) return;
  const Queue queue(views.device_index());
  Head<T> head(queue, views, weight, bias, std::min(logit_rows, count), uniforms.has_value(),
               temperature);
  head.evaluate(rounded_like(queue, hidden, weight), rows);
}

void head_forward_cuda(Tensor hidden, Tensor weight, std::optional<Tensor> bias,
                       std::optional<Tensor> targets, std::optional<Tensor> uniforms,
                       double temperature, std::optional<Tensor> exps, int64_t logit_rows,
                       Tensor tokens, Tensor stats) {
  const auto run = [&](auto type) {
    head_forward<decltype(type)>(hidden, weight, bias, targets, uniforms, temperature, exps,
                                 logit_rows, tokens, stats);
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace

template <typename T>
void launch_softmax(const Queue& queue, const Softmax<T>& call, const Rows<T>& rows,
                    const FeedBack& feed_back) {
  if (takes_vectors(call, rows.exps)) {
    launch<T, kWidth<T>>(queue, call, rows, feed_back);
  } else {
    launch<T, 1>(queue, call, rows, feed_back);
  }
}

template void launch_softmax(const Queue&, const Softmax<float>&, const Rows<float>&,
                             const FeedBack&);
template void launch_softmax(const Queue&, const Softmax<double>&, const Rows<double>&,
                             const FeedBack&);

}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("head_forward", accumext::boxed<accumext::cuda::head_forward_cuda>);
}
