#include "cuda/decoder/end_rows.cuh"
#include "cuda/decoder/matrix_arguments.h"
#include "cuda/enqueue.h"

namespace accumext::cuda {
namespace {

void end_rows_cuda(Tensor tokens, Tensor active, Tensor limits, int64_t step, int64_t eos,
                   int64_t pad, Tensor next_active, Tensor inputs) {
  const Views views(tokens);
  const int64_t rows = tokens.numel();
  const EndRows call{.rows = rows,
                     .tokens = views.column<const int64_t>(tokens, rows),
                     .active = views.column<const bool>(active, rows),
                     .limits = views.column<const int64_t>(limits, rows),
                     .step = step,
                     .eos = eos,
                     .pad = pad,
                     .next_active = views.column<bool>(next_active, rows),
                     .inputs = views.column<int64_t>(inputs, rows)};
  const Queue queue(views.device_index());
  queue.launch(end_rows_kernel, (rows + kBlockSize - 1) / kBlockSize, kBlockSize, call);
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("end_rows", accumext::boxed<accumext::cuda::end_rows_cuda>);
}
