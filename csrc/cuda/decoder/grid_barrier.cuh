// A barrier for the blocks of a cooperative launch.
#pragma once

#include "cuda/decoder/instructions.cuh"
#include "cuda/device.cuh"

namespace accumext::cuda {

// The source line that calls a barrier: the test shim compares those of the blocks, a GPU does not.
#ifdef __CUDACC__
struct CallSite {
  __device__ static CallSite current() { return {}; }
};
#else
using CallSite = host_cuda::Site;
#endif

// A block's writes before arrive() are visible after wait() to every block that shares the counter.
// Between both, a block may do work that no other block waits for. The counter, 0 when the kernel
// begins, only grows: no block can be ahead of another by more than one barrier.
class GridBarrier {
 public:
  // `expected` is in shared memory, for thread 0 only; `blocks` blocks share the counter.
  __device__ GridBarrier(unsigned long long* arrived, unsigned long long* expected, unsigned blocks)
      : arrived_(arrived), expected_(expected), blocks_(blocks) {
    if (threadIdx.x == 0) *expected_ = 0;
  }

  __device__ void arrive(CallSite site = CallSite::current()) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    *expected_ += blocks_;
    count_up_release(arrived_);
#ifndef __CUDACC__
    host_cuda::Device::current().block_arrives(site);
#endif
  }

  __device__ void wait() const {
    if (threadIdx.x == 0) {
      while (!has_reached(arrived_, *expected_)) __nanosleep(kPause);
    }
    __syncthreads();
  }

 private:
  static constexpr unsigned kPause = 20;  // nanoseconds

  unsigned long long* arrived_;
  unsigned long long* expected_;
  unsigned blocks_;
};

}  // namespace accumext::cuda
