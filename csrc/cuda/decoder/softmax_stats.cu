#include <algorithm>
#include <optional>

#include "cuda/decoder/matrix_arguments.h"
#include "cuda/decoder/softmax_stats.cuh"
#include "cuda/launch.h"

namespace accumext::cuda {
namespace {

// Two launches of as many blocks as the device holds at once, or as there are tiles.
template <typename T, int kCount>
void launch(Softmax<T>& call, const Rows<T>& rows, bool tempered, int32_t device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  const torch::stable::Device here(torch::headeronly::DeviceType::CUDA, device);
  const cudaStream_t stream = current_stream(device);
  const int64_t bytes = softmax_workspace(call, tempered, nullptr);
  // It may go once the kernels are enqueued: the allocator reuses memory in the order of the
  // stream.
  const Tensor memory =
      torch::stable::empty({bytes}, torch::headeronly::ScalarType::Byte, std::nullopt, here);
  softmax_workspace(call, tempered, static_cast<std::byte*>(memory.data_ptr()));

  const int64_t bands = call.tiles.bands();
  const int64_t resident = kSoftmaxBlocks * multiprocessors(device);
  const int64_t slots = std::min(call.tiles.chunks(), (resident + bands - 1) / bands);
  softmax_chunks_kernel<T, kCount><<<bands * slots, kBlockSize, 0, stream>>>(call);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const int64_t writers = rows.exps.data == nullptr ? 0 : slots;
  softmax_rows_kernel<T, kCount><<<bands * (1 + writers), kBlockSize, 0, stream>>>(call, rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename T>
void softmax_stats(const Tensor& logits, const Tensor& targets,
                   const std::optional<Tensor>& uniforms, double temperature,
                   const std::optional<Tensor>& exps, const Tensor& tokens, const Tensor& stats) {
  const Views views(logits);
  require(logits.dim() == 2 && logits.size(1) > 0 && temperature > 0.0);
  const int64_t count = logits.size(0);
  const int64_t columns = logits.size(1);
  Softmax<T> call{};
  call.logits = views.matrix<const T>(logits, count, columns);
  const Rows<T> rows{.targets = views.column<const int64_t>(targets, count),
                     .uniforms = views.column<const double>(uniforms, count),
                     .exps = views.any_matrix(exps, count, columns),
                     .tokens = views.column<int64_t>(tokens, count),
                     .stats = views.matrix<T>(stats, 3, count)};
  if (count == 0) return;
  call.tiles = tiles_of(count, columns, call.logits, rows.exps);
  call.inverse_temperature = inverse_of<T>(temperature);
  const bool tempered = uniforms.has_value() && temperature != 1.0;
  if (takes_vectors(call, rows.exps)) {
    launch<T, kWidth<T>>(call, rows, tempered, views.device_index());
  } else {
    launch<T, 1>(call, rows, tempered, views.device_index());
  }
}

void softmax_stats_cuda(Tensor logits, Tensor targets, std::optional<Tensor> uniforms,
                        double temperature, std::optional<Tensor> exps, Tensor tokens,
                        Tensor stats) {
  const auto run = [&](auto type) {
    softmax_stats<decltype(type)>(logits, targets, uniforms, temperature, exps, tokens, stats);
  };
  float_dtype(logits) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("softmax_stats", accumext::boxed<accumext::cuda::softmax_stats_cuda>);
}
