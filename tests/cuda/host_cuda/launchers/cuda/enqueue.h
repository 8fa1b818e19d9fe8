// What launchers ask of CUDA, on the host: csrc/cuda/enqueue.h has the same for a GPU. Kernels run
// at once, on fibers; their launches are counted.
#pragma once

#include <optional>
#include <type_traits>
#include <vector>

#include "common/arguments.h"
#include "cuda/device_limits.h"

namespace accumext::cuda {

class Queue {
 public:
  explicit Queue(int32_t) {}

  int multiprocessors() const { return 2; }

  template <typename... Parameters>
  void launch(void (*kernel)(Parameters...), int64_t blocks, int threads,
              const std::type_identity_t<Parameters>&... arguments) const {
    if (blocks == 0) return;
    ++launches;
    host_cuda::Device::current().launch(kernel, blocks, threads, arguments...);
  }

  // Those of an H100 with as many multiprocessors as a test asks for; none take no window whole.
  template <typename... Parameters>
  DeviceLimits limits(void (*)(Parameters...)) const {
    return {.blocks = blocks_together,
            .shared_bytes = 225 << 10,
            .l2_bytes = 50 << 20,
            .capability = 90};
  }

  template <typename... Parameters>
  void launch_together(void (*kernel)(Parameters...), int64_t blocks, int threads,
                       int64_t shared_bytes,
                       const std::type_identity_t<Parameters>&... arguments) const {
    ++launches;
    host_cuda::Device::current().launch_together(kernel, blocks, threads, shared_bytes,
                                                 arguments...);
  }

  void clear(void* memory, int64_t bytes) const { std::memset(memory, 0, bytes); }

  Tensor empty(const std::vector<int64_t>& shape, torch::headeronly::ScalarType dtype) const {
    Tensor memory = torch::stable::empty(shape, dtype);
    std::memset(memory.data_ptr(), 0xff, memory.numel() * memory.element_size());  // NaN
    return memory;
  }

  inline static int64_t launches = 0;
  inline static int blocks_together = 0;
};

}  // namespace accumext::cuda
