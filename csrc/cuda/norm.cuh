// Kernels of a norm over a list of tensors: a partial per chunk, then all of them in one block. Two
// launches per call of total_norm.
#pragma once

#include "cuda/closing.cuh"
#include "cuda/device.cuh"
#include "cuda/reduce.cuh"
#include "math/accumulate.h"
#include "math/norm.h"

namespace accumext::cuda {

// The clip of a micro-batch, decided on the device.
struct Clip {
  double coef;
  bool skip;  // a gradient is not finite and the micro-batch is to be left out
};

// The destinations of a norm once it is known.
struct Outcome {
  void* norm = nullptr;        // [], of norm_dtype; or null
  Dtype norm_dtype;            // kFloat or kDouble
  float* found_inf = nullptr;  // [], or null
  Closing closing = {};        // of a window; without pointers there is none
  Clip* clip = nullptr;
  double max_norm = 0.0;   // with clip
  bool if_finite = false;  // with clip
};

// partials[c] = the terms of |grad * inv_scale| over chunk c, and whether each grad is finite.
//
//   grid    any                          block   kBlockSize threads, over a chunk at a time
//   reads   grad, any dtype, [chunk], once: 2, 4 or 8 bytes per element; inv_scale
//   writes  partials, [chunks]: 16 bytes per kElementsPerChunk elements
template <NormKind kKind, size_t kTableBytes>
__global__ void __launch_bounds__(kBlockSize, kResidentBlocks)
    norm_kernel(const __grid_constant__ Table<1, kTableBytes> table, Norm<kKind> norm,
                Scalar inv_scale, Partial* __restrict__ partials) {
  reduce_chunks(table, norm, partials, [&](const Entry<1>& entry, int64_t chunk) {
    return with_type(entry.dtype[0], [&](auto type) {
      using scalar_t = decltype(type);
      using acc_t = acc_type<scalar_t>;
      const scalar_t* grad = data_of<const scalar_t>(entry, 0);
      const acc_t factor = static_cast<acc_t>(value(inv_scale));
      ThreadSum<kKind, acc_t> sum{norm};
      acc_t probe = 0;
      // A power takes longer than its load, and needs registers.
      constexpr int kUnroll = kKind == NormKind::kPowers ? 1 : kInFlight<scalar_t>;
      walk<kUnroll, scalar_t>(
          table, entry, chunk,
          [&]<int kCount, bool kAligned>(Access<kCount, kAligned>, const auto& at) {
            return read<kCount>(grad + at.of[0]);
          },
          [&]<int kCount>(const Vector<scalar_t, kCount>& x, const auto&) {
            sum.add(kCount, [&](int n) {
              const acc_t g = load<acc_t>(x.get(n));
              probe += nonfinite_probe(g);
              return norm.term(scaled(g, factor));
            });
          });
      return Partial{sum.total, is_finite_probe(probe)};
    });
  });
}

constexpr int kFinishThreads = 1024;

// The norm of all partials, and what follows from it. The order of sums depends only on `count`.
//
//   grid    one block                    block   kFinishThreads threads
//   reads   partials, [count]: 16 bytes each
//   writes  outcome.norm; outcome.found_inf, only 1; outcome.clip; what outcome.closing writes;
//   each
//           unless null
template <NormKind kKind>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const Partial* __restrict__ partials, int64_t count, Norm<kKind> norm,
                  Outcome outcome) {
  constexpr int kUnroll = 8;  // in flight
  constexpr int kWarps = kFinishThreads / kWarpSize;
  __shared__ Partial of_warp[kWarps];
  Partial mine = norm.none();
  for (int64_t first = threadIdx.x; first < count; first += kUnroll * kFinishThreads) {
    Partial next[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kFinishThreads;
      next[u] = i < count ? partials[i] : norm.none();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) mine = norm.combine(mine, next[u]);
  }
  mine = warp_combined(norm, mine);
  if (lane() == 0) of_warp[threadIdx.x / kWarpSize] = mine;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  static_assert(kWarps == kWarpSize);
  const Partial all = warp_combined(norm, of_warp[lane()]);
  if (lane() != 0) return;
  const double root = count > 0 ? norm.root(all.total) : 0.0;
  if (outcome.found_inf != nullptr && !all.finite) *outcome.found_inf = 1.0f;
  double stored = root;
  double coef;
  if (outcome.norm_dtype == Dtype::kDouble) {
    if (outcome.norm != nullptr) *static_cast<double*>(outcome.norm) = root;
    coef = clip_coef(root, outcome.max_norm);
  } else {
    const float narrow = static_cast<float>(root);
    if (outcome.norm != nullptr) *static_cast<float*>(outcome.norm) = narrow;
    coef = clip_coef(narrow, static_cast<float>(outcome.max_norm));
    stored = narrow;
  }
  if (outcome.clip != nullptr) *outcome.clip = {coef, outcome.if_finite && !all.finite};
  if (outcome.closing.numbers != nullptr) close_window(outcome.closing, stored, all.finite);
}

}  // namespace accumext::cuda
