#include "cpu/decoder/head_forward.h"

namespace accumext::cpu {
namespace {

template <typename T>
void head_sample(Team& team, const Tensor& hidden, const Tensor& weight,
                 const std::optional<Tensor>& bias, const Tensor& uniforms, double temperature,
                 int64_t top_k, double top_p, int64_t logit_rows, const Tensor& tokens,
                 const Tensor& stats) {
  const int64_t count = hidden.size(0);
  require(weight.dim() == 2 && weight.size(1) == hidden.size(1) && weight.size(0) > 0);
  require(!bias || bias->numel() == weight.size(0));
  require(1 <= top_k && top_k <= weight.size(0) && 0 < top_p && top_p <= 1);
  require(uniforms.numel() == count && tokens.numel() == count && stats.numel() == 3 * count);
  require(logit_rows >= 1);
  if (count == 0) return;
  const int64_t piece = std::min({logit_rows, kMaxLogitRows, count});
  Head<T> head(team, weight, elements<T>(bias), piece, temperature, kDtypeOf<T>, 0);
  T* stat = elements<T>(stats);
  for_each_piece<T>(hidden, piece, [&](int64_t first, int64_t rows, const T* columns) {
    head.sample_top(columns, padded(rows),
                    {.count = rows,
                     .top_k = top_k,
                     .top_p = top_p,
                     .uniforms = elements<double>(uniforms) + first,
                     .tokens = integers(tokens) + first,
                     .peak = stat + first,
                     .total = stat + count + first,
                     .logit = stat + 2 * count + first});
  });
}

void head_sample_cpu(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor uniforms,
                     double temperature, int64_t top_k, double top_p, int64_t logit_rows,
                     Tensor tokens, Tensor stats) {
  const auto run = [&](auto type) {
    Team::gather(most_threads(weight), [&](Team& team) {
      head_sample<decltype(type)>(team, hidden, weight, bias, uniforms, temperature, top_k, top_p,
                                  logit_rows, tokens, stats);
    });
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("head_sample", accumext::boxed<accumext::cpu::head_sample_cpu>);
}
