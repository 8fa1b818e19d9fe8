// The persistent kernel's launcher: a window of decoder steps without a launch per step.
#pragma once

#include "cuda/decoder/persistent_kernel.h"
#include "cuda/device.cuh"
#include "cuda/enqueue.h"

namespace accumext::cuda {

template <typename T>
PersistentKernel kernel_of(int64_t batch) {
  if (batch <= 16) return persistent_kernel<T, 1>();
  if (batch <= 32) return persistent_kernel<T, 2>();
  return persistent_kernel<T, 4>();
}

inline PersistentKernel kernel_of(const PersistentCall& call) {
  if (call.operand == Dtype::kHalf) return kernel_of<__half>(call.batch);
  return kernel_of<__nv_bfloat16>(call.batch);
}

// Tells whether the kernel can run this window on the queue's device. Launches nothing.
inline bool persistent_fits(const Queue& queue, const PersistentCall& call) {
  return persistent_plan(call, queue.limits(kernel_of(call), kBlockSize)).blocks > 0;
}

// Runs the window, which must fit: allocates scratch memory from torch, clears its counters, and
// launches one kernel. A CUDA graph may capture it.
inline void launch_persistent(const Queue& queue, const PersistentCall& call) {
  const PersistentKernel kernel = kernel_of(call);
  const PersistentPlan plan = persistent_plan(call, queue.limits(kernel, kBlockSize));
  require(plan.blocks > 0);
  const Tensor memory = queue.empty({plan.scratch_bytes}, torch::headeronly::ScalarType::Byte);
  auto* const scratch = static_cast<std::byte*>(memory.data_ptr());
  queue.clear(scratch, plan.zeroed);
  queue.launch_together(kernel, plan.blocks, kBlockSize, plan.shared_bytes, call, plan, scratch);
}

}  // namespace accumext::cuda
