// Limits of a kernel that has a device to itself: no torch here, and no CUDA.
#pragma once

#include <cstdint>

namespace accumext::cuda {

struct DeviceLimits {
  int blocks;            // that can run at the same time, one on each multiprocessor; 0: none
  int64_t shared_bytes;  // dynamic shared memory of a block
  int64_t l2_bytes;
  int capability;  // 80 for 8.0
};

}  // namespace accumext::cuda
