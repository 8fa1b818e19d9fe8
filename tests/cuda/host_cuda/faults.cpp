// Kernels and uses of CUDA's runtime with one fault each, by which the tests know that simt.h, the
// sanitizers and runtime.cpp see it. Usage: faults NAME ORDER; prints the result of the
// kernel, or the name of the runtime's last error.
#include "instructions.h"
//
#include <cmath>
#include <map>
#include <string>

#include "cuda/decoder/grid_barrier.cuh"
#include "cuda/decoder/instructions.cuh"
#include "runtime.cpp"
#include "simt.cpp"

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

// --- blocks that are there at the same time ---

using accumext::cuda::GridBarrier;

constexpr int kBlocks = 3;

// The memory that the blocks share: zeroed.
struct Meeting {
  unsigned long long arrived;
  double of_block[kBlocks];
};

GridBarrier barrier(Meeting* meeting) {
  static thread_local unsigned long long expected;
  return GridBarrier(&meeting->arrived, &expected, gridDim.x);
}

// 1 + 2 + 3, as blocks with a fault may form it.
template <bool kWait>
void sum_of_blocks(double* result, Meeting* meeting) {
  const GridBarrier all = barrier(meeting);
  if (threadIdx.x == 0) meeting->of_block[blockIdx.x] = blockIdx.x + 1;
  all.arrive();
  if constexpr (kWait) all.wait();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *result = meeting->of_block[0] + meeting->of_block[1] + meeting->of_block[2];
  }
}

// Each block's static shared memory is its own.
void shared_memory_apart(double* result, Meeting* meeting) {
  __shared__ double mine[kBlockSize];
  mine[threadIdx.x] = blockIdx.x;
  sum_of_blocks<true>(result, meeting);
  if (mine[threadIdx.x] != blockIdx.x) *result = NAN;
}

void a_block_stays_away(double*, Meeting* meeting) {
  const GridBarrier all = barrier(meeting);
  if (blockIdx.x == 1) return;
  all.arrive();
  all.wait();
}

void a_block_does_not_wait(double*, Meeting* meeting) {
  const GridBarrier all = barrier(meeting);
  all.arrive();
  if (blockIdx.x == 1) return;
  all.wait();
  all.arrive();
}

void blocks_meet_twice_at_once(double*, Meeting* meeting) {
  const GridBarrier all = barrier(meeting);
  if (blockIdx.x == 1) {
    all.arrive();
  } else {
    all.arrive();
  }
  all.wait();
}

// A thread copies 0, 1, 2, 3 and adds them up.
enum class Fault { kNone, kNoWait, kNoGroup, kOneGroupTooFew, kNoEnd, kTooEarly, kMisaligned };

template <Fault kFault>
void copies(double* result, Meeting*) {
  using accumext::cuda::Octet;
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  alignas(16) static float from[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  alignas(16) float to[4] = {};
  auto* const octet = reinterpret_cast<Octet*>(to);
  accumext::cuda::copy_async(octet, from + (kFault == Fault::kMisaligned ? 1 : 0), 16, 0);
  if (kFault != Fault::kNoGroup) accumext::cuda::end_group();
  if (kFault == Fault::kOneGroupTooFew) {
    accumext::cuda::wait_for_group<1>();
  } else if (kFault != Fault::kNoWait && kFault != Fault::kNoEnd) {
    accumext::cuda::wait_for_group<0>();
  }
  if (kFault == Fault::kTooEarly) accumext::cuda::copy_async(octet, from, 16, 0);
  *result = to[0] + to[1] + to[2] + to[3];
  if (kFault == Fault::kNoEnd) return;
  accumext::cuda::end_group();
  accumext::cuda::wait_for_group<0>();
}

const std::map<std::string, void (*)(double*, Meeting*)> kTogether = {
    {"blocks_meet", sum_of_blocks<true>},
    {"blocks_have_their_shared_memory", shared_memory_apart},
    {"blocks_do_not_wait", sum_of_blocks<false>},
    {"a_block_stays_away", a_block_stays_away},
    {"a_block_does_not_wait", a_block_does_not_wait},
    {"blocks_meet_at_two_places", blocks_meet_twice_at_once},
    {"copies", copies<Fault::kNone>},
    {"copies_without_waiting", copies<Fault::kNoWait>},
    {"copies_in_no_group", copies<Fault::kNoGroup>},
    {"copies_of_which_one_is_not_awaited", copies<Fault::kOneGroupTooFew>},
    {"copies_under_way_at_the_end", copies<Fault::kNoEnd>},
    {"copies_that_come_too_early", copies<Fault::kTooEarly>},
    {"a_misaligned_copy", copies<Fault::kMisaligned>},
};

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

// --- uses of CUDA's runtime ---

constexpr int kMostShared = 232448;  // of an H100, dynamic and static

void fill(float* data) { data[threadIdx.x] = 1.0f; }

struct Options {
  unsigned blocks = 1;
  size_t shared_bytes = 0;
  bool together = false;
  float* data = nullptr;
};

cudaError_t start(const Options& options) {
  cudaLaunchAttribute together{cudaLaunchAttributeCooperative, {1}};
  const cudaLaunchConfig_t config{{options.blocks}, {32},      options.shared_bytes,
                                  stream(),         &together, options.together};
  return cudaLaunchKernelEx(&config, fill, options.data);
}

cudaError_t ask_for(size_t shared_bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(fill),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

struct Large {
  std::byte bytes[4097];
};

__global__ void take_large(Large) {}

float* taken() { return static_cast<float*>(take(32 * sizeof(float))); }

const std::map<std::string, void (*)()> kUses = {
    {"a_right_use",
     [] {
       float* const data = taken();
       start({.data = data});
       synchronize(/*last_first=*/false);
       if (data[31] != 1.0f) std::abort();
       give_back(data);
     }},
    {"no_blocks", [] { start({.blocks = 0}); }},
    {"shared_memory_not_asked_for", [] { start({.shared_bytes = 48 << 10}); }},
    {"more_shared_memory_than_asked_for",
     [] {
       ask_for(64 << 10);
       start({.shared_bytes = (64 << 10) + 1});
     }},
    {"more_shared_memory_than_there_is", [] { ask_for(kMostShared); }},
    {"blocks_that_do_not_fit", [] { start({.blocks = 132 * 8 + 1, .together = true}); }},
    {"blocks_that_shared_memory_keeps_out",
     [] {
       ask_for(kMostShared - kStaticShared);
       start({.blocks = 133, .shared_bytes = kMostShared - kStaticShared, .together = true});
     }},
    {"blocks_that_cannot_wait",
     [] {
       use_device(runtime().add_device({2, kMostShared, 90, /*cooperative=*/false, 65536}));
       start({.together = true});
     }},
    {"large_arguments_for_an_old_driver",
     [] {
       host_cuda_set_driver_version(12000);
       const cudaLaunchConfig_t config{{1}, {32}, 0, stream(), nullptr, 0};
       cudaLaunchKernelEx(&config, take_large, Large{});
     }},
    {"memory_given_back_before",
     [] {
       float* const data = taken();
       give_back(data);
       start({.data = data});
       synchronize(/*last_first=*/false);
     }},
    {"memory_of_a_later_stream",
     [] {
       host_cuda_use_stream(host_cuda_new_stream());
       float* const data = taken();
       host_cuda_use_stream(nullptr);
       start({.data = data});
       synchronize(/*last_first=*/false);
     }},
};

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  if (kUses.contains(name)) {
    runtime().add_device({132, kMostShared, 90, /*cooperative=*/true, 65536});  // an H100
    kUses.at(name)();
    synchronize(/*last_first=*/false);
    std::puts(cudaGetErrorName(cudaGetLastError()));
    return 0;
  }
  const auto result = std::make_unique<double>(0.0);
  Device device;
  device.set_order(static_cast<Order>(std::stoi(arguments[2])));
  Meeting meeting{};
  if (kTogether.contains(name)) {
    device.launch_together(kTogether.at(name), kBlocks, kBlockSize, /*shared_bytes=*/0,
                           result.get(), &meeting);
  } else {
    device.launch(kKernels.at(name), kBlocks, kBlockSize, result.get());
  }
  std::printf("%g\n", *result);
}
