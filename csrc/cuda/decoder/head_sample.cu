#include <optional>

#include "cuda/decoder/best_launch.h"
#include "cuda/decoder/head.h"
#include "cuda/decoder/sample_shares.cuh"

namespace accumext::cuda {

// Two launches.
template <typename T>
void launch_sample(const Queue& queue, Softmax<T> call, const Rows<T>& rows,
                   const FeedBack& feed_back, const TokenFilter& filter, double temperature) {
  const bool few = filter.top_k <= kMostBest;
  Best<T> best{.size = few ? static_cast<int>(filter.top_k) : 0};
  const Tensor memory = chunk_memory(queue, call, best);
  const int64_t count = call.tiles.rows;
  if (few) {
    launch_chunks(queue, best_of_chunks_kernel<T>, kBestBlocks, call, best);
    queue.launch(sample_best_kernel<T>, count, kBlockSize, call, best, rows, feed_back,
                 inverse_of<double>(temperature), filter.top_p);
  } else {
    launch_chunks(queue, softmax_chunks_kernel<T, kWidth<T>>, kSoftmaxBlocks, call);
    const Shares<T> shares{filter.top_k, filter.top_p, inverse_of<T>(temperature),
                           unit_of<T>(call.tiles.columns)};
    queue.launch(sample_shares_kernel<T>, count, kSampleThreads, call, shares, rows, feed_back);
  }
}

template void launch_sample(const Queue&, Softmax<float>, const Rows<float>&, const FeedBack&,
                            const TokenFilter&, double);
template void launch_sample(const Queue&, Softmax<double>, const Rows<double>&, const FeedBack&,
                            const TokenFilter&, double);

namespace {

template <typename T>
void head_sample(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                 const Tensor& uniforms, double temperature, const TokenFilter& filter,
                 int64_t logit_rows, const Tensor& tokens, const Tensor& stats) {
  const Views views(hidden);
  require(hidden.dim() == 2 && weight.dim() == 2 && logit_rows >= 1);
  require(1 <= filter.top_k && filter.top_k <= weight.size(0));
  require(0.0 < filter.top_p && filter.top_p <= 1.0);
  const int64_t count = hidden.size(0);
  views.matrix<const T>(hidden, count, weight.size(1));
  const Rows<T> rows{.uniforms = views.column<const double>(uniforms, count),
                     .tokens = views.column<int64_t>(tokens, count),
                     .stats = views.matrix<T>(stats, 3, count)};
  if (count == 0) return;
  const Queue queue(views.device_index());
  Head<T> head(queue, views, weight, bias, std::min(logit_rows, count), /*sampled=*/true,
               temperature, filter);
  head.evaluate(rounded_like(queue, hidden, weight), rows);
}

void head_sample_cuda(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor uniforms,
                      double temperature, int64_t top_k, double top_p, int64_t logit_rows,
                      Tensor tokens, Tensor stats) {
  const auto run = [&](auto type) {
    head_sample<decltype(type)>(hidden, weight, bias, uniforms, temperature, {top_k, top_p},
                                logit_rows, tokens, stats);
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("head_sample", accumext::boxed<accumext::cuda::head_sample_cuda>);
}
