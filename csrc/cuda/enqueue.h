// Where the kernels of a call go: its device and current stream. What launchers need of CUDA itself
// stands here, so that they can also be compiled for the host: the test shim has a file of this
// name.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "common/arguments.h"
#include "cuda/device_limits.h"

namespace accumext::cuda {

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int multiprocessors(int32_t device) {
  int count = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Nothing here waits for the device, so a call may be captured in a CUDA graph.
class Queue {
 public:
  explicit Queue(int32_t device)
      : device_(device), guard_(device), stream_(current_stream(device)) {}

  int multiprocessors() const { return cuda::multiprocessors(device_); }

  // kernel<<<blocks, threads>>>(arguments...), unless there are no blocks.
  template <typename... Parameters>
  void launch(void (*kernel)(Parameters...), int64_t blocks, int threads,
              const std::type_identity_t<Parameters>&... arguments) const {
    if (blocks == 0) return;
    kernel<<<blocks, threads, 0, stream_>>>(arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // What the kernel may ask for where its blocks run at the same time.
  template <typename... Parameters>
  DeviceLimits limits(void (*kernel)(Parameters...)) const {
    if (attribute(cudaDevAttrCooperativeLaunch) == 0) return {};
    cudaFuncAttributes of_kernel;
    STD_CUDA_CHECK(cudaFuncGetAttributes(&of_kernel, reinterpret_cast<const void*>(kernel)));
    const int64_t shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return {.blocks = multiprocessors(),
            .shared_bytes = shared_bytes - static_cast<int64_t>(of_kernel.sharedSizeBytes),
            .l2_bytes = attribute(cudaDevAttrL2CacheSize),
            .capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                          attribute(cudaDevAttrComputeCapabilityMinor)};
  }

  // The same with blocks that run at the same time, within `limits`.
  template <typename... Parameters>
  void launch_together(void (*kernel)(Parameters...), int64_t blocks, int threads,
                       int64_t shared_bytes,
                       const std::type_identity_t<Parameters>&... arguments) const {
    const void* function = reinterpret_cast<const void*>(kernel);
    STD_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)));
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    STD_CUDA_CHECK(cudaLaunchCooperativeKernel(function, dim3(static_cast<unsigned>(blocks)),
                                               dim3(threads), pointers, shared_bytes, stream_));
  }

  // So many bytes become 0.
  void clear(void* memory, int64_t bytes) const {
    STD_CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream_));
  }

  // Uninitialised. It may go once the kernels are enqueued, because the caching allocator reuses
  // memory in the order of the stream.
  Tensor empty(const std::vector<int64_t>& shape, torch::headeronly::ScalarType dtype) const {
    const torch::stable::Device device(torch::headeronly::DeviceType::CUDA, device_);
    return torch::stable::empty(shape, dtype, std::nullopt, device);
  }

 private:
  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device_));
    return value;
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace accumext::cuda
