#include <optional>

#include "cuda/decoder/head.h"
#include "cuda/decoder/objective.cuh"

namespace accumext::cuda {
namespace {

// As many blocks for every band, or row, as the device holds at once, or as there is work for.
template <typename T>
void launch(const Queue& queue, const Objective<T>& call) {
  const Tiles& tiles = call.model.tiles;
  const int64_t resident = kObjectiveBlocks * queue.multiprocessors();
  const auto shared = [&](int64_t parts, int64_t most) {
    return parts * std::min(most, (resident + parts - 1) / parts);
  };
  const int64_t blocks = shared(tiles.bands(), tiles.chunks());
  queue.launch(objective_chunks_kernel<T>, blocks, kBlockSize, call);
  queue.launch(objective_rows_kernel<T>, tiles.bands(), kBlockSize, call);
  if (call.gradients.data == nullptr) return;
  queue.launch(objective_gradients_kernel<T>, blocks, kBlockSize, call);
  queue.launch(objective_given_kernel<T>,
               shared(tiles.rows, (call.size + kBlockSize - 1) / kBlockSize), kBlockSize, call);
}

template <typename T>
void head_objective(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                    const Tensor& targets, const Tensor& share, const DistributionRules& rules,
                    double temperature, const std::optional<Tensor>& probabilities,
                    const std::optional<Tensor>& indices,
                    const std::optional<Tensor>& teacher_hidden,
                    const std::optional<Tensor>& teacher_weight,
                    const std::optional<Tensor>& teacher_bias,
                    const std::optional<Tensor>& gradients, int64_t logit_rows,
                    const Tensor& tokens, const Tensor& stats) {
  const Views views(hidden);
  require(hidden.dim() == 2 && weight.dim() == 2 && logit_rows >= 1 && temperature > 0.0);
  require(probabilities.has_value() == indices.has_value());
  require(teacher_hidden.has_value() == teacher_weight.has_value());
  const int64_t count = hidden.size(0);
  const int64_t vocabulary = weight.size(0);
  views.matrix<const T>(hidden, count, weight.size(1));
  Objective<T> all{.inverse_temperature = inverse_of<T>(temperature), .rules = rules};
  all.targets = views.column<const int64_t>(targets, count);
  all.share = views.column<const T>(share, count);
  if (indices) {
    require(indices->dim() == 2);
    all.size = indices->size(1);
    all.probabilities = views.matrix<const T>(probabilities, count, all.size);
    all.indices = views.matrix<const int64_t>(indices, count, all.size);
  }
  if (teacher_weight) {
    require(teacher_weight->dim() == 2 && teacher_weight->size(0) == vocabulary);
    views.matrix<const T>(teacher_hidden, count, teacher_weight->size(1));
  }
  all.tokens = views.column<int64_t>(tokens, count);
  all.stats = views.matrix<T>(stats, 5, count);
  all.gradients = views.any_matrix(gradients, count, vocabulary);
  if (count == 0) return;

  const Queue queue(views.device_index());
  const int64_t most = std::min(logit_rows, count);
  LogitsProduct<T> model(queue, views, weight, bias, most);
  const Tensor operand = rounded_like(queue, hidden, weight);
  std::optional<LogitsProduct<T>> teacher;
  std::optional<Tensor> teacher_operand;
  if (teacher_weight) {
    teacher.emplace(queue, views, *teacher_weight, teacher_bias, most);
    teacher_operand = rounded_like(queue, *teacher_hidden, *teacher_weight);
  }
  for (int64_t first = 0; first < count; first += most) {
    Objective<T> call = all.from(first);
    const int64_t rows = std::min(most, count - first);
    call.model = model.of(operand, first, rows, call.gradients);
    if (teacher) call.teacher = teacher->of(*teacher_operand, first, rows, call.gradients);
    const int64_t bytes = objective_workspace(call, nullptr);
    const Tensor memory = queue.empty({bytes}, torch::headeronly::ScalarType::Byte);
    objective_workspace(call, static_cast<std::byte*>(memory.data_ptr()));
    launch(queue, call);
  }
}

void head_objective_cuda(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor targets,
                         Tensor share, double z_loss, double entropy_weight, double soft_scale,
                         double temperature, std::optional<Tensor> probabilities,
                         std::optional<Tensor> indices, std::optional<Tensor> teacher_hidden,
                         std::optional<Tensor> teacher_weight, std::optional<Tensor> teacher_bias,
                         std::optional<Tensor> gradients, int64_t logit_rows, Tensor tokens,
                         Tensor stats) {
  const auto run = [&](auto type) {
    head_objective<decltype(type)>(hidden, weight, bias, targets, share,
                                   {z_loss, entropy_weight, soft_scale}, temperature, probabilities,
                                   indices, teacher_hidden, teacher_weight, teacher_bias, gradients,
                                   logit_rows, tokens, stats);
  };
  float_dtype(hidden) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("head_objective", accumext::boxed<accumext::cuda::head_objective_cuda>);
}
