// What every launcher needs: the current stream, and a call's table in device memory.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "arguments.h"
#include "chunks.h"
#include "cuda/device.cuh"
#include "cuda/norm.cuh"

namespace accumext::cuda {

inline cudaStream_t current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline Tensor device_bytes(const Tensor& like, size_t size) {
  using torch::headeronly::ScalarType;
  return torch::stable::empty({static_cast<int64_t>(size)}, ScalarType::Byte, std::nullopt,
                              like.device());
}

inline Entry<1> entry(const Span& span, int64_t first_dim) {
  const int64_t dims = static_cast<int64_t>(span.layout.size());
  return {{span.data}, {span.dtype}, first_dim, dims};
}

inline Entry<2> entry(const Pair& pair, int64_t first_dim) {
  const int64_t dims = static_cast<int64_t>(pair.layout.size());
  return {{pair.main_grad, const_cast<void*>(pair.grad)},
          {pair.main_dtype, pair.grad_dtype},
          first_dim,
          dims};
}

// A list of tensors as one table and one grid, however many they are. Its memory may go once the
// kernels are enqueued: the caching allocator reuses it in stream order.
template <int kOperands>
class DeviceTable {
 public:
  template <typename Operand>  // Span or Pair
  DeviceTable(const std::vector<Operand>& operands, const Tensor& like, cudaStream_t stream) {
    const std::vector<Chunk> chunks = plan_chunks(numels(operands));
    std::vector<Entry<kOperands>> entries;
    std::vector<Dim<kOperands>> dims;
    for (const Operand& operand : operands) {
      entries.push_back(entry(operand, static_cast<int64_t>(dims.size())));
      dims.insert(dims.end(), operand.layout.begin(), operand.layout.end());
    }
    std::vector<std::byte> bytes;
    const size_t chunks_at = append(bytes, chunks);
    const size_t entries_at = append(bytes, entries);
    const size_t dims_at = append(bytes, dims);
    memory_ = device_bytes(like, bytes.size());
    std::byte* memory = static_cast<std::byte*>(memory_.data_ptr());
    // From pageable memory: the copy is staged before the call returns, so `bytes` may go.
    STD_CUDA_CHECK(
        cudaMemcpyAsync(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream));
    blocks_ = static_cast<int64_t>(chunks.size());
    table_ = {reinterpret_cast<const Chunk*>(memory + chunks_at),
              reinterpret_cast<const Entry<kOperands>*>(memory + entries_at),
              reinterpret_cast<const Dim<kOperands>*>(memory + dims_at)};
  }

  const Table<kOperands>& table() const { return table_; }
  int64_t blocks() const { return blocks_; }

 private:
  // Where the items start. Every item's size is a multiple of 8, the strictest alignment of all.
  template <typename T>
  static size_t append(std::vector<std::byte>& bytes, const std::vector<T>& items) {
    static_assert(sizeof(T) % 8 == 0 && alignof(T) <= 8);
    const size_t at = bytes.size();
    bytes.resize(at + items.size() * sizeof(T));
    if (!items.empty()) std::memcpy(bytes.data() + at, items.data(), items.size() * sizeof(T));
    return at;
  }

  Tensor memory_;
  Table<kOperands> table_{};
  int64_t blocks_ = 0;
};

// One Partial per block of the table.
template <int kOperands>
Tensor new_partials(const DeviceTable<kOperands>& table, const Tensor& like) {
  return device_bytes(like, table.blocks() * sizeof(Partial));
}

// What follows from a norm that is still on the device: where it and found_inf go.
inline Outcome outcome(const Tensor& norm, float* found_inf) {
  return {.norm = norm.data_ptr(), .norm_dtype = float_dtype(norm), .found_inf = found_inf};
}

// Both kernels of a norm: norm.cu.
void launch_norm(const DeviceTable<1>& grads, double p, const Scalar& inv_scale, const Tensor& like,
                 const Outcome& outcome, cudaStream_t stream);

// The accumulation, and its 2-norm's partials: accumulate.cu.
void launch_accumulate(const DeviceTable<2>& pairs, const Scalar& inv_scale, const Clip* clip,
                       bool overwrite, Partial* partials, cudaStream_t stream);

}  // namespace accumext::cuda
