// The part of CUDA's runtime that launchers call, on the host: runtime.cpp. Work put on a stream
// waits there until somebody waits for it, so that memory which does not live as long is seen; an
// error is what CUDA makes of the same call, and stays until it is asked for.
#pragma once

#include <cstddef>
#include <functional>
#include <tuple>
#include <utility>

#include "simt.h"

#define CUDART_VERSION 13000

#define HOST_CUDA_ERRORS(ERROR)                  \
  ERROR(cudaSuccess, 0)                          \
  ERROR(cudaErrorInvalidValue, 1)                \
  ERROR(cudaErrorMemoryAllocation, 2)            \
  ERROR(cudaErrorInvalidConfiguration, 9)        \
  ERROR(cudaErrorInvalidDevice, 101)             \
  ERROR(cudaErrorInvalidResourceHandle, 400)     \
  ERROR(cudaErrorCooperativeLaunchTooLarge, 720) \
  ERROR(cudaErrorNotSupported, 801)              \
  ERROR(cudaErrorStreamCaptureUnsupported, 900)  \
  ERROR(cudaErrorStreamCaptureInvalidated, 901)

enum cudaError_t {
#define HOST_CUDA_ERROR(name, number) name = number,
  HOST_CUDA_ERRORS(HOST_CUDA_ERROR)
#undef HOST_CUDA_ERROR
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrL2CacheSize,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrCooperativeLaunch,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative };
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated,
};
constexpr unsigned cudaStreamNonBlocking = 1;

namespace host_cuda {
struct Handle;  // of a stream, and later perhaps of another one
using Work = std::function<void()>;
}  // namespace host_cuda

using cudaStream_t = host_cuda::Handle*;  // null: the device's default stream

struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int threads, size_t shared_bytes);
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);

namespace host_cuda {
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, size_t argument_bytes,
                   Work work);
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  constexpr size_t kArgumentBytes = (sizeof(Parameters) + ...);
  static_assert(kArgumentBytes <= 32764, "nvcc takes no more");
  const auto run = [kernel, config = *config](const auto&... copies) {
    host_cuda::Device& device = host_cuda::Device::current();
    if (config.numAttrs > 0) {
      device.launch_together(kernel, config.gridDim.x, config.blockDim.x, config.dynamicSmemBytes,
                             copies...);
    } else {
      device.launch(kernel, config.gridDim.x, config.blockDim.x, copies...);
    }
  };
  const std::tuple<Parameters...> copies(std::forward<Arguments>(arguments)...);
  return host_cuda::launch(*config, reinterpret_cast<const void*>(kernel), kArgumentBytes,
                           [run, copies] { std::apply(run, copies); });
}
