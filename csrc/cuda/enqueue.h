// The device and current stream of a call. Every kernel is launched here.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/arguments.h"
#include "cuda/device_limits.h"

namespace accumext::cuda {

// Nothing here waits for the device, so a call may be captured in a CUDA graph.
class Queue {
 public:
  explicit Queue(int32_t device) : device_(device), guard_(device) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }
  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }

  // Tells whether the arguments of a kernel may have more than 4,096 bytes, which takes a driver
  // for CUDA 12.1.
  bool has_large_arguments() const {
    int version = 0;
    STD_CUDA_CHECK(cudaDriverGetVersion(&version));
    return version >= 12010;
  }

  // kernel<<<blocks, threads>>>(arguments...), unless there are no blocks.
  template <typename... Parameters>
  void launch(void (*kernel)(Parameters...), int64_t blocks, int threads,
              const std::type_identity_t<Parameters>&... arguments) const {
    if (blocks > 0) launch_with({}, kernel, blocks, threads, arguments...);
  }

  // Limits of the kernel if its blocks, of so many threads, run at the same time, each with a whole
  // multiprocessor. Allows the kernel that much shared memory on this device.
  template <typename... Parameters>
  DeviceLimits limits(void (*kernel)(Parameters...), int threads) const {
    static std::mutex mutex;
    static std::map<std::pair<int32_t, const void*>, DeviceLimits> found;
    const std::pair key(device_, reinterpret_cast<const void*>(kernel));
    const std::lock_guard lock(mutex);
    const auto known = found.find(key);
    if (known != found.end()) return known->second;
    return found.emplace(key, asked_limits(key.second, threads)).first->second;
  }

  // The same with blocks that run at the same time, within `limits`.
  template <typename... Parameters>
  void launch_together(void (*kernel)(Parameters...), int64_t blocks, int threads,
                       int64_t shared_bytes,
                       const std::type_identity_t<Parameters>&... arguments) const {
    cudaLaunchAttribute together{.id = cudaLaunchAttributeCooperative};
    together.val.cooperative = 1;
    launch_with(
        {.dynamicSmemBytes = static_cast<size_t>(shared_bytes), .attrs = &together, .numAttrs = 1},
        kernel, blocks, threads, arguments...);
  }

  // Sets so many bytes to 0.
  void clear(void* memory, int64_t bytes) const {
    STD_CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream_));
  }

  // An uninitialised tensor. It may be freed once the kernels are enqueued, because the caching
  // allocator reuses memory in the order of the stream.
  Tensor empty(const std::vector<int64_t>& shape, torch::headeronly::ScalarType dtype) const {
    const torch::stable::Device device(torch::headeronly::DeviceType::CUDA, device_);
    return torch::stable::empty(shape, dtype, std::nullopt, device);
  }

 private:
  template <typename... Parameters>
  void launch_with(cudaLaunchConfig_t config, void (*kernel)(Parameters...), int64_t blocks,
                   int threads, const Parameters&... arguments) const {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.stream = stream_;
    STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
  }

  DeviceLimits asked_limits(const void* kernel, int threads) const {
    if (attribute(cudaDevAttrCooperativeLaunch) == 0) return {};
    cudaFuncAttributes of_kernel;
    STD_CUDA_CHECK(cudaFuncGetAttributes(&of_kernel, kernel));
    const int shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) -
                             static_cast<int>(of_kernel.sharedSizeBytes);
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    int resident = 0;  // blocks of a multiprocessor
    STD_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared_bytes));
    if (resident == 0) return {};
    return {.blocks = multiprocessors(),
            .shared_bytes = shared_bytes,
            .l2_bytes = attribute(cudaDevAttrL2CacheSize),
            .capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                          attribute(cudaDevAttrComputeCapabilityMinor)};
  }

  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device_));
    return value;
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace accumext::cuda
