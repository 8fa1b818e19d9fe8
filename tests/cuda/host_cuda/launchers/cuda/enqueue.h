// What launchers ask of CUDA, on the host: csrc/cuda/enqueue.h has the same for a GPU. Kernels run
// at once, on fibers; their launches are counted.
#pragma once

#include <optional>
#include <type_traits>
#include <vector>

#include "common/arguments.h"

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

  Tensor empty(const std::vector<int64_t>& shape, torch::headeronly::ScalarType dtype) const {
    Tensor memory = torch::stable::empty(shape, dtype);
    std::memset(memory.data_ptr(), 0xff, memory.numel() * memory.element_size());  // NaN
    return memory;
  }

  inline static int64_t launches = 0;
};

}  // namespace accumext::cuda
