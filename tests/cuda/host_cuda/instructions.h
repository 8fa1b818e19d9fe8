// On the host what csrc/cuda/decoder/instructions.cuh does with single instructions of a GPU.
// Include this before it.
#pragma once

#include "simt.h"
//
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace host_cuda {

// The two elements of a register, the lower half first.
template <typename T>
std::array<float, 2> halves(uint32_t word) {
  T elements[2];
  std::memcpy(elements, &word, sizeof(elements));
  return {elements[0], elements[1]};
}

// mma.m16n8k16: see there which lane has what. Products are exact and added up in float.
template <typename T>
[[gnu::noinline]] void mma_16x8x16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                   Site site = Site::current()) {
  struct Fragments {
    std::array<float, 2> a[4], b[2];
  };
  const Fragments mine{{halves<T>(a[0]), halves<T>(a[1]), halves<T>(a[2]), halves<T>(a[3])},
                       {halves<T>(b[0]), halves<T>(b[1])}};
  const auto lanes = Device::current().exchanged(~0u, mine, site);
  const int group = static_cast<int>(threadIdx.x) % kWarpSize / 4;
  const int in_group = static_cast<int>(threadIdx.x) % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + i / 2 * 8;
    const int column = 2 * in_group + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int owner = k % 8 / 2;  // in its group
      const float of_a = lanes[row % 8 * 4 + owner].a[k / 8 * 2 + row / 8][k % 2];
      sums[i] += of_a * lanes[column * 4 + owner].b[k / 8][k % 2];
    }
  }
}

inline void copy_async(void* to, const void* from, int bytes) {
  Device::current().copy_async(to, from, bytes);
}

inline void end_group() { Device::current().end_group(); }

inline void wait_for_group(int later) { Device::current().wait_for_group(later); }

inline bool has_reached(const unsigned long long* counter, unsigned long long least) {
  const bool reached = races::atomically([=] { return *counter >= least; });
  if constexpr (races::kOn) {
    if (reached) races::reached(counter, least);
  }
  return reached;
}

}  // namespace host_cuda
