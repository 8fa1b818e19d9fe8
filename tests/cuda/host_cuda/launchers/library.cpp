// The device on which the launchers of a library run their kernels, and what tests ask of it.
#include "cuda/enqueue.h"

namespace {

host_cuda::Device device;

}  // namespace

extern "C" {

[[gnu::visibility("default")]] void host_cuda_set_order(int64_t order) {
  device.set_order(static_cast<host_cuda::Order>(order));
}

// Kernels since the process began.
[[gnu::visibility("default")]] int64_t host_cuda_launches() {
  return accumext::cuda::Queue::launches;
}
}
