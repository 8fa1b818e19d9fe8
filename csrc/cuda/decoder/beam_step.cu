#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "cuda/decoder/beam_step.cuh"
#include "cuda/decoder/matrix_arguments.h"
#include "cuda/enqueue.h"

namespace accumext::cuda {
namespace {

template <typename T>
void beam_step(const Views& views, BeamStep<T> call, const Tensor& logits, const Tensor& stats,
               const Tensor& kept_log_probs, const Tensor& log_probs) {
  const int64_t hypotheses = call.beams * call.rows;
  call.logits = views.dense<const T>(logits, hypotheses * call.words);
  call.stats = views.matrix<const T>(stats, hypotheses, 2);
  call.kept_log_probs = views.dense<T>(kept_log_probs, hypotheses);
  call.log_probs = views.dense<T>(log_probs, hypotheses);
  if (call.rows == 0) return;
  const Queue queue(views.device_index());
  const auto bytes = static_cast<int64_t>(6 * hypotheses * sizeof(Word<double>));
  const Tensor memory = queue.empty({bytes}, torch::headeronly::ScalarType::Byte);
  call.any = static_cast<Word<double>*>(memory.data_ptr());
  call.candidates = call.any + 2 * hypotheses;
  call.sorted = call.candidates + 2 * hypotheses;
  queue.launch(beam_step_kernel<T>, call.rows, kBlockSize, call);
}

void beam_step_cuda(Tensor logits, Tensor found, Tensor stats, Tensor limits, int64_t step,
                    double length_penalty, int64_t eos, Tensor scores, TensorList kept,
                    TensorList going) {
  const Views views(logits);
  require(scores.dim() == 2 && logits.dim() == 2 && logits.size(1) >= 1);
  const int64_t beams = scores.size(0);
  const int64_t rows = scores.size(1);
  const int64_t size = beams * rows;
  const std::vector<Tensor> old = std::move(kept).tensors();
  const std::vector<Tensor> path = std::move(going).tensors();
  require(old.size() == 3 && path.size() == 3);
  const auto run = [&](auto type) {
    BeamStep<decltype(type)> call{.rows = rows, .beams = beams, .words = logits.size(1)};
    call.found = views.dense<const int64_t>(found, size * call.words);
    call.limits = views.dense<const int64_t>(limits, rows);
    call.step = step;
    call.length_penalty = length_penalty;
    call.now = std::pow(step + 1.0, length_penalty);
    call.soon = std::pow(step + 2.0, length_penalty);
    call.eos = eos;
    call.scores = views.dense<double>(scores, size);
    call.kept_scores = views.dense<double>(old[0], size);
    call.kept_lengths = views.dense<int64_t>(old[1], 3 * size);
    call.kept_parents = call.kept_lengths + size;
    call.kept_tokens = call.kept_parents + size;
    call.parents = views.dense<int64_t>(path[0], size);
    call.tokens = views.dense<int64_t>(path[1], size);
    beam_step(views, call, logits, stats, old[2], path[2]);
  };
  float_dtype(logits) == Dtype::kDouble ? run(double()) : run(float());
}

void select_states_cuda(Tensor state, Tensor parents, Tensor of_kept, int64_t step,
                        int64_t batch_dim, Tensor next, Tensor best) {
  const Views views(state);
  require(0 <= batch_dim && batch_dim < state.dim() && best.dim() == state.dim());
  require(state.is_contiguous() && next.is_contiguous() && best.is_contiguous());
  const auto dtype = state.scalar_type();
  require(next.scalar_type() == dtype && best.scalar_type() == dtype);
  const int64_t hypotheses = state.size(batch_dim);
  const int64_t rows = best.size(batch_dim);
  int64_t outer = 1, inner = 1;
  for (int64_t d = 0; d < state.dim(); ++d) {
    require(d == batch_dim || best.size(d) == state.size(d));
    require(next.dim() == state.dim() && next.size(d) == state.size(d));
    if (d != batch_dim) (d < batch_dim ? outer : inner) *= state.size(d);
  }
  const auto* const of_hypotheses = views.dense<const int64_t>(parents, hypotheses);
  const auto* const lengths = views.dense<const int64_t>(of_kept, 3 * hypotheses);
  const int64_t elements = outer * (hypotheses + rows) * inner;
  const Queue queue(views.device_index());
  const auto run = [&](auto type) {
    using E = decltype(type);
    const int64_t resident = kResidentBlocks * queue.multiprocessors();
    const int64_t blocks = std::min((elements + kBlockSize - 1) / kBlockSize, resident);
    queue.launch(select_states_kernel<E>, blocks, kBlockSize,
                 static_cast<const E*>(state.data_ptr()), static_cast<E*>(next.data_ptr()),
                 static_cast<E*>(best.data_ptr()), of_hypotheses, lengths, lengths + hypotheses,
                 step + 1, outer, hypotheses, rows, inner);
  };
  switch (state.element_size()) {
    case 1:
      return run(uint8_t());
    case 2:
      return run(uint16_t());
    case 4:
      return run(uint32_t());
    case 8:
      return run(uint64_t());
    default:
      require(false);
  }
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("beam_step", accumext::boxed<accumext::cuda::beam_step_cuda>);
  m.impl("select_states", accumext::boxed<accumext::cuda::select_states_cuda>);
}
