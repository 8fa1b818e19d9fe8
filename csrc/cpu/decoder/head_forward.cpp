#include "cpu/decoder/head_forward.h"

namespace accumext::cpu {
namespace {

template <typename T>
void head_forward(Team& team, const Tensor& hidden, const Tensor& weight,
                  const std::optional<Tensor>& bias, const std::optional<Tensor>& targets,
                  const std::optional<Tensor>& uniforms, double temperature,
                  const std::optional<Tensor>& exps, int64_t logit_rows, const Tensor& tokens,
                  const Tensor& stats) {
  const int64_t count = hidden.size(0);
  const Workspace workspace(exps);
  require(weight.dim() == 2 && weight.size(1) == hidden.size(1) && weight.size(0) > 0);
  require(!bias || bias->numel() == weight.size(0));
  require(!targets || targets->numel() == count);
  require(tokens.numel() == count && stats.numel() == 3 * count);
  require(!uniforms || uniforms->numel() == count);
  require(workspace.data == nullptr || workspace.rows >= count);
  require(logit_rows >= 1);
  if (count == 0) return;
  const int64_t piece = std::min({logit_rows, kMaxLogitRows, count});
  Head<T> head(team, weight, elements<T>(bias), piece, temperature, workspace.dtype,
               workspace.stride);
  const int64_t* target = targets ? integers(*targets) : nullptr;
  for (int64_t i = 0; i < count && target != nullptr; ++i) {
    require(target[i] >= 0 && target[i] < head.vocabulary());
  }
  const double* uniform = elements<double>(uniforms);
  T* stat = elements<T>(stats);
  for_each_piece<T>(hidden, piece, [&](int64_t first, int64_t rows, const T* columns) {
    head.evaluate(columns, padded(rows), nullptr,
                  {.count = rows,
                   .targets = target == nullptr ? nullptr : target + first,
                   .uniforms = uniform == nullptr ? nullptr : uniform + first,
                   .tokens = integers(tokens) + first,
                   .peak = stat + first,
                   .total = stat + count + first,
                   .target_logit = stat + 2 * count + first,
                   .exps = workspace.row(first)});
  });
}

void head_forward_cpu(Tensor hidden, Tensor weight, std::optional<Tensor> bias,
                      std::optional<Tensor> targets, std::optional<Tensor> uniforms,
                      double temperature, std::optional<Tensor> exps, int64_t logit_rows,
                      Tensor tokens, Tensor stats) {
  const auto run = [&](auto type) {
    Team::gather(most_threads(weight), [&](Team& team) {
      head_forward<decltype(type)>(team, hidden, weight, bias, targets, uniforms, temperature, exps,
                                   logit_rows, tokens, stats);
    });
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("head_forward", accumext::boxed<accumext::cpu::head_forward_cpu>);
}
