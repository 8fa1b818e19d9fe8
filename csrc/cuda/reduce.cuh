// Sums over chunks, in an order that depends neither on the grid nor on the GPU: threads of a warp,
// warps of a block, chunks of the list.
#pragma once

#include <cstdint>

#include "cuda/device.cuh"
#include "cuda/tensor_list.h"
#include "math/norm.h"

namespace accumext::cuda {

// The terms of a chunk that one thread has read. They are added in acc_t within a vector, and
// vectors are added in double.
template <NormKind kKind, typename acc_t>
struct ThreadSum {
  const Norm<kKind>& norm;
  double total = Norm<kKind>::template identity<double>();

  template <typename Term>  // acc_t term(int n)
  __device__ void add(int count, const Term& term) {
    acc_t sum = term(0);
#pragma unroll
    for (int n = 1; n < count; ++n) sum = norm.combine(sum, term(n));
    total = norm.combine(total, static_cast<double>(sum));
  }
};

// Combines the partials of a warp's lanes. Every lane must call it; lane 0 gets the result.
template <NormKind kKind>
__device__ Partial warp_combined(const Norm<kKind>& norm, Partial mine) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const double other = __shfl_down_sync(kAllLanes, mine.total, distance);
    mine.total = norm.combine(mine.total, other);
  }
  return {mine.total, __all_sync(kAllLanes, mine.finite) != 0};
}

// partials[c] = the threads' partials f(entry, c) of chunk c, combined, for the block's share of
// the chunks; f is called even if partials is null. The warps synchronise only once in kBatch
// chunks, so that one may wait for memory while another adds.
template <int kOperands, size_t kBytes, NormKind kKind, typename F>
__device__ void reduce_chunks(const Table<kOperands, kBytes>& table, const Norm<kKind>& norm,
                              Partial* __restrict__ partials, const F& f) {
  constexpr int kBatch = 32;
  constexpr int kWarps = kBlockSize / kWarpSize;
  __shared__ Partial of_warp[kBatch][kWarps];
  const int64_t end = share(table, blockIdx.x + int64_t{1});
  for (int64_t first = share(table, blockIdx.x); first < end; first += kBatch) {
    const int64_t last = first + kBatch < end ? first + kBatch : end;
    for_each_chunk(table, first, last, [&](const Entry<kOperands>& entry, int64_t chunk) {
      const Partial mine = f(entry, chunk);
      if (partials == nullptr) return;
      const Partial all = warp_combined(norm, mine);
      if (lane() == 0) of_warp[chunk - first][threadIdx.x / kWarpSize] = all;
    });
    if (partials == nullptr) continue;
    __syncthreads();
    if (threadIdx.x < last - first) {
      Partial all = of_warp[threadIdx.x][0];
      for (int warp = 1; warp < kWarps; ++warp) {
        all = norm.combine(all, of_warp[threadIdx.x][warp]);
      }
      partials[first + threadIdx.x] = all;
    }
    __syncthreads();
  }
}

}  // namespace accumext::cuda
