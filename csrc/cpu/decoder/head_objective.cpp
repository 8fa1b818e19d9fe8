#include "cpu/decoder/head_forward.h"

namespace accumext::cpu {
namespace {

template <typename T>
void head_objective(Team& team, const Tensor& hidden, const Tensor& weight,
                    const std::optional<Tensor>& bias, const Tensor& targets, const Tensor& share,
                    double z_loss, double entropy_weight, double soft_scale, double temperature,
                    const std::optional<Tensor>& probabilities,
                    const std::optional<Tensor>& indices,
                    const std::optional<Tensor>& teacher_hidden,
                    const std::optional<Tensor>& teacher_weight,
                    const std::optional<Tensor>& teacher_bias,
                    const std::optional<Tensor>& gradients, int64_t logit_rows,
                    const Tensor& tokens, const Tensor& stats) {
  const int64_t count = hidden.size(0);
  const Workspace workspace(gradients);
  require(weight.dim() == 2 && weight.size(1) == hidden.size(1) && weight.size(0) > 0);
  require(!bias || bias->numel() == weight.size(0));
  require(targets.numel() == count && share.numel() == count && tokens.numel() == count);
  require(stats.dim() == 2 && stats.numel() == 5 * count && temperature > 0.0);
  const bool narrow = std::is_same_v<T, float> && workspace.dtype == Dtype::kBFloat16;
  require(workspace.data == nullptr || workspace.dtype == kDtypeOf<T> || narrow);
  require(workspace.data == nullptr || workspace.rows >= count);
  require(logit_rows >= 1 && probabilities.has_value() == indices.has_value());
  require(teacher_hidden.has_value() == teacher_weight.has_value());
  if (count == 0) return;
  const int64_t words = weight.size(0);
  for (int64_t i = 0; i < count; ++i)
    require(0 <= integers(targets)[i] && integers(targets)[i] < words);
  int64_t size = 0;
  int64_t index_stride = 0;  // 0: of all rows the same
  const int64_t* index = nullptr;
  if (indices) {
    require(indices->dim() == 2 && indices->size(0) == count);
    require(property(aoti_torch_get_dtype, *indices) == aoti_torch_dtype_int64());
    size = indices->size(1);
    require(probabilities->numel() == count * size && (indices->stride(1) == 1 || size <= 1));
    index_stride = indices->stride(0);
    index = static_cast<const int64_t*>(indices->const_data_ptr());
    for (int64_t i = 0; i < (index_stride == 0 ? 1 : count); ++i) {
      for (int64_t k = 0; k < size; ++k) {
        require(0 <= index[i * index_stride + k] && index[i * index_stride + k] < words);
      }
    }
  }
  const int64_t piece = std::min({logit_rows, kMaxLogitRows, count});
  Head<T> head(team, weight, elements<T>(bias), piece, temperature, workspace.dtype,
               workspace.stride);
  std::optional<Head<T>> teacher;
  std::optional<Buffer<T>> columns;
  if (teacher_weight) {
    require(teacher_weight->size(0) == words && teacher_hidden->size(0) == count);
    require(teacher_weight->size(1) == teacher_hidden->size(1));
    require(!teacher_bias || teacher_bias->numel() == words);
    teacher.emplace(team, *teacher_weight, elements<T>(teacher_bias), piece, temperature,
                    kDtypeOf<T>, 0);
    columns.emplace(teacher_hidden->size(1) * padded(piece));
  }
  const T* share_of = elements<T>(share);
  const T* soft = elements<T>(probabilities);
  T* stat = elements<T>(stats);
  for_each_piece<T>(hidden, piece, [&](int64_t first, int64_t rows, const T* student_columns) {
    if (columns) to_columns(*teacher_hidden, first, rows, columns->get());
    head.differentiate(student_columns, padded(rows), teacher ? &*teacher : nullptr,
                       columns ? columns->get() : nullptr,
                       {.count = rows,
                        .targets = integers(targets) + first,
                        .share = share_of + first,
                        .rules = {z_loss, entropy_weight, soft_scale},
                        .probabilities = soft == nullptr ? nullptr : soft + first * size,
                        .indices = index == nullptr ? nullptr : index + first * index_stride,
                        .index_stride = index_stride,
                        .size = size,
                        .tokens = integers(tokens) + first,
                        .lse = stat + first,
                        .target_logit = stat + count + first,
                        .entropy = stat + 2 * count + first,
                        .divergence = stat + 3 * count + first,
                        .target_gradient = stat + 4 * count + first,
                        .gradients = workspace.row(first)});
  });
}

void head_objective_cpu(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor targets,
                        Tensor share, double z_loss, double entropy_weight, double soft_scale,
                        double temperature, std::optional<Tensor> probabilities,
                        std::optional<Tensor> indices, std::optional<Tensor> teacher_hidden,
                        std::optional<Tensor> teacher_weight, std::optional<Tensor> teacher_bias,
                        std::optional<Tensor> gradients, int64_t logit_rows, Tensor tokens,
                        Tensor stats) {
  const auto run = [&](auto type) {
    Team::gather(most_threads(weight), [&](Team& team) {
      head_objective<decltype(type)>(team, hidden, weight, bias, targets, share, z_loss,
                                     entropy_weight, soft_scale, temperature, probabilities,
                                     indices, teacher_hidden, teacher_weight, teacher_bias,
                                     gradients, logit_rows, tokens, stats);
    });
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("head_objective", accumext::boxed<accumext::cpu::head_objective_cpu>);
}
