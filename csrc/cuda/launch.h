// The data of every launcher: the device and current stream of its tensors, and their table.
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

// A call on a list of any number of tensors; launches go to the current stream of their device.
template <int kOperands>
class Call {
 public:
  // largest: bytes of the largest table that its kernels take as an argument.
  template <typename Operand>  // Span, Pair or NumberedPair
  Call(const std::vector<Operand>& operands, int32_t device, size_t largest = kLargeTable)
      : queue_(device), packed_(operands) {
    const size_t bytes = packed_.bytes().size();
    if (bytes <= kSmallTable) return;
    large_ = bytes <= largest && queue_.has_large_arguments();
    if (!large_) memory_ = uploaded(packed_.bytes(), device, queue_.stream());
  }

  int64_t chunks() const { return packed_.chunks(); }

  // Uninitialised memory of the device, in bytes.
  Tensor workspace(int64_t size) const {
    return queue_.empty({size}, torch::headeronly::ScalarType::Byte);
  }

  // A 0-dim tensor, not yet set, for a norm of these operands: float64 if any of them is.
  template <typename Operand>
  Tensor new_norm(const std::vector<Operand>& operands, Dtype Operand::* dtype) const {
    using torch::headeronly::ScalarType;
    const bool wide = norm_dtype(operands, dtype) == Dtype::kDouble;
    return queue_.empty({}, wide ? ScalarType::Double : ScalarType::Float);
  }

  // Launches a kernel that works chunk by chunk, unless all tensors are empty. As many blocks as
  // the device holds at once share the chunks.
  template <size_t kBytes, typename... Parameters>
  void for_chunks(void (*kernel)(Table<kOperands, kBytes>, Parameters...),
                  const std::type_identity_t<Parameters>&... arguments) const {
    const int64_t resident = kResidentBlocks * queue_.multiprocessors();
    queue_.launch(kernel, std::min(chunks(), resident), kBlockSize,
                  packed_.template table<kBytes>(memory_.get()), arguments...);
  }

  // The same with the kernel for small tables, or for large ones.
  template <typename... Parameters>
  void for_chunks(void (*small)(SmallTable<kOperands>, Parameters...),
                  void (*large)(LargeTable<kOperands>, Parameters...),
                  const std::type_identity_t<Parameters>&... arguments) const {
    if (large_) {
      for_chunks(large, arguments...);
    } else {
      for_chunks(small, arguments...);
    }
  }

  // Launches the kernel that finishes a norm from its partials.
  template <NormKind kKind>
  void finish(const Partial* partials, const Norm<kKind>& norm, const Outcome& outcome) const {
    queue_.launch(finish_kernel<kKind>, 1, kFinishThreads, partials, chunks(), norm, outcome);
  }

 private:
  Queue queue_;
  Packed<kOperands> packed_;
  bool large_ = false;                       // a table among the arguments, but not a small one
  std::shared_ptr<const std::byte> memory_;  // of a table that is too long for them
};

// The norm of an empty list, on no device in particular.
inline Tensor norm_of_nothing() {
  return torch::stable::full({}, 0.0, torch::headeronly::ScalarType::Float);
}

// The memory on the device for a norm and found_inf.
inline Outcome outcome(const Tensor& norm, float* found_inf) {
  return {.norm = norm.data_ptr(), .norm_dtype = float_dtype(norm), .found_inf = found_inf};
}

// Both kernels of a norm: norm.cu.
void launch_norm(const Call<1>& call, double p, const Scalar& inv_scale, const Outcome& outcome);

// The accumulation, and its 2-norm's partials unless they are null: accumulate.cu.
void launch_accumulate(const Call<2>& call, const Scalar& inv_scale, const Clip* clip,
                       bool overwrite, Partial* partials);

}  // namespace accumext::cuda
