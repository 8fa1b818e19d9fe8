// Samples of the fewest words of a row whose probabilities reach a share, without a sort.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decoder/best_words.cuh"

namespace accumext::cuda {

constexpr int kSampleThreads = 1024;

// The words that may be drawn, and their weights.
template <typename T>
struct Shares {
  int64_t top_k;          // the largest ones
  double top_p;           // of these the fewest, largest first, with this share of their weight
  T inverse_temperature;  // weights are whole numbers, so that sums of them are exact:
  T unit;                 // exp((z - peak) * inverse_temperature) * unit
};

// The largest power of 2 with which the weights of so many words add up to less than 2 ** 62.
template <typename T>
T unit_of(int64_t words) {
  int bits = 62;
  for (int64_t some = 1; some < words; some *= 2) --bits;
  return std::ldexp(T(1), bits);
}

// Calls f(word) for the words of this thread.
template <typename T, typename F>
__device__ void for_words(const Logits<T>& call, int64_t row, const F& f) {
  constexpr int kPart = 4;  // elements in flight
  for (int64_t first = threadIdx.x; first < call.tiles.columns; first += kPart * kSampleThreads) {
    T z[kPart];
#pragma unroll
    for (int n = 0; n < kPart; ++n) {
      const int64_t column = first + n * kSampleThreads;
      z[n] = column < call.tiles.columns ? call.logit(row, column) : T(0);
    }
#pragma unroll
    for (int n = 0; n < kPart; ++n) {
      const int64_t column = first + n * kSampleThreads;
      if (column < call.tiles.columns) f(word_of<T>(key_of(z[n]), column));
    }
  }
}

// Draws a column by inversion: the first at which the running sum of the weights exceeds the
// uniform number times the whole sum, which is not 0. Every thread must call it.
template <typename Weight>  // uint64_t weight(int64_t column)
__device__ int64_t drawn_column(int64_t columns, double uniform, const Weight& weight) {
  __shared__ int64_t begin, drawn;
  __shared__ uint64_t target;
  constexpr int kWarpCount = kSampleThreads / kWarpSize;
  // Each warp adds up a part of the columns, and then each thread a part of the part.
  const int64_t part = (columns + kWarpCount - 1) / kWarpCount;
  const int64_t of_warp = static_cast<int64_t>(threadIdx.x) / kWarpSize * part;
  uint64_t sum = 0;
#pragma unroll 4
  for (int64_t i = lane(); i < part; i += kWarpSize) {
    if (of_warp + i < columns) sum += weight(of_warp + i);
  }
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  const Span warps = span_of<kSampleThreads>(lane() == 0 ? sum : 0);
  auto reached = static_cast<uint64_t>(uniform * static_cast<double>(warps.whole));
  if (reached >= warps.whole) reached = warps.whole - 1;
  if (warps.holds(reached)) {
    begin = of_warp;
    target = reached - warps.before;
  }
  __syncthreads();
  const int64_t size = (part + kSampleThreads - 1) / kSampleThreads;
  const int64_t first = begin + threadIdx.x * size;
  sum = 0;
  for (int64_t i = threadIdx.x * size; i < (threadIdx.x + 1) * size; ++i) {
    if (i < part && begin + i < columns) sum += weight(begin + i);
  }
  const Span threads = span_of<kSampleThreads>(sum);
  if (threads.holds(target)) {
    int64_t column = first;
    for (uint64_t before = threads.before; before + weight(column) <= target; ++column) {
      before += weight(column);
    }
    drawn = column;
  }
  __syncthreads();
  return drawn;
}

// From the results of softmax_chunks_kernel, of logits that lie along the rows.
//
//   grid    rows      block   kSampleThreads threads
//   reads   logits, T, [rows, columns]: once for each digit by which the largest are selected, once
//           for their sum, once for the sample; peak, at, sum; uniforms; with feed_back what
//           softmax_rows_kernel does
//   writes  stats, T, [3, rows]; tokens, int64, [rows]; with feed_back what softmax_rows_kernel
//   does
template <typename T>
__global__ void __launch_bounds__(kSampleThreads, 1)
    sample_shares_kernel(Softmax<T> call, Shares<T> shares, Rows<T> rows, FeedBack feed_back) {
  __shared__ Selection selection;
  const int64_t row = blockIdx.x;
  const int64_t columns = call.tiles.columns;
  const RowStats<T> stats = stats_of_row(call, row);
  const auto weight = [&](Word<T> word) -> uint64_t {
    const T depth = (logit_of<T>(word) - stats.peak.value) * shares.inverse_temperature;
    const T share = std::exp(depth) * shares.unit;
    return share > T(0) ? static_cast<uint64_t>(share) : 0;  // of NaN 0
  };
  Word<T> least = 1;
  const auto kept = [&](const auto& f) {
    for_words(call, row, [&](Word<T> word) {
      if (word >= least) f(word);
    });
  };
  int64_t token = 0;
  if (std::abs(stats.peak.value) < T(INFINITY)) {  // the same for all threads
    if (shares.top_k < columns) {
      least = least_of_largest<T, kSampleThreads>(selection, shares.top_k, kept,
                                                  [](Word<T>) { return uint64_t{1}; });
    }
    if (shares.top_p < 1.0) {
      uint64_t sum = 0;
      kept([&](Word<T> word) { sum += weight(word); });
      const auto whole = static_cast<double>(span_of<kSampleThreads>(sum).whole);
      const auto wanted = static_cast<uint64_t>(std::ceil(shares.top_p * whole));
      const Word<T> of_share =
          least_of_largest<T, kSampleThreads>(selection, wanted > 0 ? wanted : 1, kept, weight);
      if (of_share > least) least = of_share;  // else all of the top_k
    }
    token = drawn_column(columns, rows.uniforms[row], [&](int64_t column) -> uint64_t {
      const Word<T> word = word_of<T>(key_of(call.logit(row, column)), column);
      return word >= least ? weight(word) : 0;
    });
  }
  finish_row(call, rows, feed_back, row, stats, token);
}

}  // namespace accumext::cuda
