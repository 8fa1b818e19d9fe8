// The device on which the launchers of a library run their kernels, and what tests ask of it.
#include "cuda/enqueue.h"

namespace {

host_cuda::Device device;

}  // namespace

extern "C" {

[[gnu::visibility("default")]] void host_cuda_set_order(int64_t order) {
  device.set_order(static_cast<host_cuda::Order>(order));
}

// How many blocks can run at the same time from now on; 0: no kernel that needs it is launched.
[[gnu::visibility("default")]] void host_cuda_set_blocks_together(int64_t blocks) {
  accumext::cuda::Queue::blocks_together = static_cast<int>(blocks);
}

// Kernels since the process began.
[[gnu::visibility("default")]] int64_t host_cuda_launches() {
  return accumext::cuda::Queue::launches;
}
}
