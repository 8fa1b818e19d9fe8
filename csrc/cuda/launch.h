// What every launcher needs: its tensors' device and current stream, and their table there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/arguments.h"
#include "cuda/device.cuh"
#include "cuda/enqueue.h"
#include "cuda/norm.cuh"
#include "cuda/tensor_list.h"
#include "cuda/upload_cache.h"

namespace accumext::cuda {

// A call on a list of tensors, however many they are: launches go to the current stream of their
// device. What it allocates may go once the kernels are enqueued, because the caching allocator
// reuses memory in the order of the stream.
template <int kOperands>
class Call {
 public:
  template <typename Operand>  // Span, Pair or NumberedPair
  Call(const std::vector<Operand>& operands, int32_t device)
      : device_(device), guard_(device), stream_(current_stream(device)) {
    const Packed<kOperands> packed(operands);
    if (packed.chunks() > 0) memory_ = uploaded(packed.bytes(), device_, stream_);
    table_ = packed.at(memory_.get());
  }

  int64_t chunks() const { return table_.chunks; }

  // Uninitialised memory of the device, in bytes.
  Tensor workspace(int64_t size) const {
    return empty({size}, torch::headeronly::ScalarType::Byte);
  }

  // A 0-dim tensor, not yet set, for a norm of these operands: float64 if any of them is.
  template <typename Operand>
  Tensor new_norm(const std::vector<Operand>& operands, Dtype Operand::* dtype) const {
    using torch::headeronly::ScalarType;
    const bool wide = norm_dtype(operands, dtype) == Dtype::kDouble;
    return empty({}, wide ? ScalarType::Double : ScalarType::Float);
  }

  // Launches a kernel that works chunk by chunk, unless all tensors are empty. As many blocks as
  // the device holds at once share the chunks.
  template <typename... Parameters>
  void for_chunks(void (*kernel)(Table<kOperands>, Parameters...),
                  std::type_identity_t<Parameters>... arguments) const {
    if (chunks() == 0) return;
    const int64_t blocks = std::min<int64_t>(chunks(), kResidentBlocks * multiprocessors(device_));
    kernel<<<blocks, kBlockSize, 0, stream_>>>(table_, arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // Launches what follows from the partials of a norm.
  template <NormKind kKind>
  void finish(const Partial* partials, const Norm<kKind>& norm, const Outcome& outcome) const {
    finish_kernel<<<1, kFinishThreads, 0, stream_>>>(partials, chunks(), norm, outcome);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  Tensor empty(std::vector<int64_t> shape, torch::headeronly::ScalarType dtype) const {
    const torch::stable::Device device(torch::headeronly::DeviceType::CUDA, device_);
    return torch::stable::empty(shape, dtype, std::nullopt, device);
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
  std::shared_ptr<const std::byte> memory_;
  Table<kOperands> table_;
};

// The norm of an empty list, on no device in particular.
inline Tensor norm_of_nothing() {
  return torch::stable::full({}, 0.0, torch::headeronly::ScalarType::Float);
}

// What follows from a norm that is still on the device: where it and found_inf go.
inline Outcome outcome(const Tensor& norm, float* found_inf) {
  return {.norm = norm.data_ptr(), .norm_dtype = float_dtype(norm), .found_inf = found_inf};
}

// Both kernels of a norm of the last operands: norm.cu.
template <int kOperands>
void launch_norm(const Call<kOperands>& call, double p, const Scalar& inv_scale,
                 const Outcome& outcome);

// The accumulation, and its 2-norm's partials unless they are null: accumulate.cu.
void launch_accumulate(const Call<2>& call, const Scalar& inv_scale, const Clip* clip,
                       bool overwrite, Partial* partials);

}  // namespace accumext::cuda
