#include "cuda/decoder/persistent_launch.h"
#include "cuda/decoder/persistent_plan.h"
#include "cuda/decoder/persistent_steps.cuh"
#include "cuda/launch.h"

namespace accumext::cuda {
namespace {

using Kernel = void (*)(PersistentCall, PersistentPlan, std::byte*);

template <typename T>
Kernel kernel_of(int64_t batch) {
  if (batch <= 8) return persistent_steps_kernel<T, 1>;
  if (batch <= 16) return persistent_steps_kernel<T, 2>;
  if (batch <= 32) return persistent_steps_kernel<T, 4>;
  return persistent_steps_kernel<T, 8>;
}

Kernel kernel_of(const PersistentCall& call) {
  if (call.operand == Dtype::kHalf) return kernel_of<__half>(call.batch);
  return kernel_of<__nv_bfloat16>(call.batch);
}

int attribute(cudaDeviceAttr which, int32_t device) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

DeviceLimits limits_of(const PersistentCall& call, int32_t device) {
  DeviceLimits limits{};
  limits.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                      attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (limits.capability < 80 || attribute(cudaDevAttrCooperativeLaunch, device) == 0) return {};
  cudaFuncAttributes kernel;
  STD_CUDA_CHECK(cudaFuncGetAttributes(&kernel, kernel_of(call)));
  limits.blocks = multiprocessors(device);
  limits.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) -
                        static_cast<int64_t>(kernel.sharedSizeBytes);
  limits.l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  return limits;
}

}  // namespace

bool persistent_fits(const PersistentCall& call, int32_t device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  return persistent_plan(call, limits_of(call, device)).blocks > 0;
}

void launch_persistent(const PersistentCall& call, int32_t device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  const torch::stable::Device here(torch::headeronly::DeviceType::CUDA, device);
  const cudaStream_t stream = current_stream(device);
  const PersistentPlan plan = persistent_plan(call, limits_of(call, device));
  require(plan.blocks > 0);
  // It may go once the kernel is enqueued: the allocator reuses memory in the order of the stream.
  const Tensor memory = torch::stable::empty(
      {plan.scratch_bytes}, torch::headeronly::ScalarType::Byte, std::nullopt, here);
  auto* scratch = static_cast<std::byte*>(memory.data_ptr());
  STD_CUDA_CHECK(cudaMemsetAsync(scratch, 0, plan.zeroed, stream));

  const Kernel kernel = kernel_of(call);
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(plan.shared_bytes)));
  void* arguments[] = {const_cast<PersistentCall*>(&call), const_cast<PersistentPlan*>(&plan),
                       &scratch};
  STD_CUDA_CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel),
                                             dim3(plan.blocks), dim3(kBlockSize), arguments,
                                             plan.shared_bytes, stream));
}

}  // namespace accumext::cuda
