// Kernels with one fault each, by which the tests know that simt.h and the sanitizers see it.
// Usage: faults NAME ORDER; prints the result of the kernel.
#include "simt.h"
//
#include <cmath>
#include <map>
#include <string>
#include <type_traits>

namespace {

constexpr int kBlockSize = 128;

// The sum of 0, 1, ... kBlockSize - 1, as a block with a fault may form it.
template <bool kWithBarrier, int kWritingWarps>
void sum(double* result) {
  __shared__ double warps[kBlockSize / 32];
  double total = threadIdx.x;
  for (int delta = 16; delta > 0; delta /= 2) total += __shfl_down_sync(~0u, total, delta);
  if (threadIdx.x % 32 == 0 && threadIdx.x < 32 * kWritingWarps) warps[threadIdx.x / 32] = total;
  if constexpr (kWithBarrier) __syncthreads();
  if (threadIdx.x != 0) return;
  *result = 0;
  for (const double warp : warps) *result += warp;
}

void barrier_in_a_branch(double*) {
  if (threadIdx.x < 32) __syncthreads();
}

void two_barriers(double*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void a_lane_has_left(double*) {
  if (threadIdx.x != 3) __all_sync(~0u, 1);
}

void a_lane_at_a_barrier(double*) {
  if (threadIdx.x == 3) __syncthreads();
  __all_sync(~0u, 1);
  if (threadIdx.x != 3) __syncthreads();
}

void some_lanes(double*) { __ballot_sync(0xffff, 1); }

void beyond_shared_memory(double* result) {
  __shared__ double shared[kBlockSize];
  shared[threadIdx.x + 1] = 1;
  __syncthreads();
  *result = shared[threadIdx.x];
}

void beyond_the_buffer(double* result) { result[threadIdx.x] = threadIdx.x; }

void misaligned_vector(double* result) {
  struct alignas(16) Vector {
    double x[2];
  };
  double buffer[4] = {};
  const int odd = reinterpret_cast<uintptr_t>(buffer) % 16 == 0;
  *result = reinterpret_cast<const Vector*>(buffer + odd)->x[0];
}

void blocks_that_race(double* result) { *result = blockIdx.x; }

const std::map<std::string, void (*)(double*)> kKernels = {
    {"none", sum<true, kBlockSize / 32>},
    {"a_barrier_left_out", sum<false, kBlockSize / 32>},
    {"shared_memory_not_written", sum<true, kBlockSize / 32 - 1>},
    {"barrier_in_a_branch", barrier_in_a_branch},
    {"two_barriers", two_barriers},
    {"a_lane_has_left", a_lane_has_left},
    {"a_lane_at_a_barrier", a_lane_at_a_barrier},
    {"some_lanes", some_lanes},
    {"beyond_shared_memory", beyond_shared_memory},
    {"beyond_the_buffer", beyond_the_buffer},
    {"misaligned_vector", misaligned_vector},
    {"blocks_that_race", blocks_that_race},
};

}  // namespace

int main(int, char** arguments) {
  const auto result = std::make_unique<double>(0.0);
  host_cuda::Device device;
  device.set_order(static_cast<host_cuda::Order>(std::stoi(arguments[2])));
  device.launch(kKernels.at(arguments[1]), /*grid=*/3, kBlockSize, result.get());
  std::printf("%g\n", *result);
}
