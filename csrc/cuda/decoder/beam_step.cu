#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/decoder/beam_step.cuh"
#include "cuda/decoder/matrix_arguments.h"
#include "cuda/enqueue.h"

namespace accumext::cuda {
namespace {

template <typename T>
KeptHypotheses<T> kept_from(const Views& views, const std::vector<Tensor>& kept, int64_t size) {
  require(kept.size() == 3);
  auto* const numbers = views.dense<int64_t>(kept[1], 3 * size);
  return {views.dense<double>(kept[0], size), numbers, numbers + size, numbers + 2 * size,
          views.dense<T>(kept[2], size)};
}

template <typename T>
void beam_step(BeamStep<T> call, const Views& views, const Tensor& logits, const Tensor& peak,
               const Tensor& total, const std::vector<Tensor>& kept,
               const std::vector<Tensor>& next_kept, const Tensor& log_probs) {
  const int64_t hypotheses = call.beams * call.rows;
  call.logits = views.dense<const T>(logits, hypotheses * call.words);
  call.peak = views.dense<const T>(peak, hypotheses);
  call.total = views.dense<const T>(total, hypotheses);
  call.kept = kept_from<T>(views, kept, hypotheses);
  call.next_kept = kept_from<T>(views, next_kept, hypotheses);
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

int64_t beam_step_cuda(Tensor logits, Tensor found, Tensor peak, Tensor total, Tensor limits,
                       Tensor late, int64_t step, double now, double soon, int64_t eos,
                       Tensor scores, Tensor active, TensorList kept, Tensor next_scores,
                       TensorList next_kept, TensorList going, Tensor from_row, Tensor is_new,
                       Tensor best_row) {
  const Views views(logits);
  require(scores.dim() == 2 && logits.dim() == 2);
  const int64_t beams = scores.size(0);
  const int64_t rows = scores.size(1);
  const int64_t size = beams * rows;
  const int64_t words = logits.size(1);
  require(words >= 1);
  const std::vector<Tensor> before = std::move(kept).tensors();
  const std::vector<Tensor> after = std::move(next_kept).tensors();
  const std::vector<Tensor> path = std::move(going).tensors();
  require(path.size() == 3);
  const auto run = [&](auto type) {
    using T = decltype(type);
    BeamStep<T> call{.rows = rows, .beams = beams, .words = words};
    call.found = views.dense<const int64_t>(found, size * words);
    call.limits = views.dense<const int64_t>(limits, rows);
    call.late = views.dense<const double>(late, rows);
    call.step = step;
    call.now = now;
    call.soon = soon;
    call.eos = eos;
    call.scores = views.dense<const double>(scores, size);
    call.active = views.dense<bool>(active, rows);
    call.next_scores = views.dense<double>(next_scores, size);
    call.parents = views.dense<int64_t>(path[0], size);
    call.tokens = views.dense<int64_t>(path[1], size);
    call.from_row = views.dense<int64_t>(from_row, size);
    call.is_new = views.dense<bool>(is_new, rows);
    call.best_row = views.dense<int64_t>(best_row, rows);
    beam_step(call, views, logits, peak, total, before, after, path[2]);
  };
  float_dtype(logits) == Dtype::kDouble ? run(double()) : run(float());
  return 1;  // there may be a new best hypothesis: the host does not wait to know
}

void select_states_cuda(Tensor state, Tensor from_row, Tensor is_new, Tensor best_row,
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
  const auto* const from = views.dense<const int64_t>(from_row, hypotheses);
  const auto* const fresh = views.dense<const bool>(is_new, rows);
  const auto* const best_from = views.dense<const int64_t>(best_row, rows);
  const int64_t elements = outer * (hypotheses + rows) * inner;
  const Queue queue(views.device_index());
  const auto run = [&](auto type) {
    using E = decltype(type);
    const int64_t resident = kResidentBlocks * queue.multiprocessors();
    const int64_t blocks = std::min((elements + kBlockSize - 1) / kBlockSize, resident);
    queue.launch(select_states_kernel<E>, blocks, kBlockSize,
                 static_cast<const E*>(state.data_ptr()), static_cast<E*>(next.data_ptr()),
                 static_cast<E*>(best.data_ptr()), from, fresh, best_from, outer, hypotheses, rows,
                 inner);
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
