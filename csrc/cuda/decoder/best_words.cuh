// The best k words of each row of logits, and samples of them: the best of every chunk, then those
// of the row. Two launches for any shape; logits are read once.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/decoder/radix_select.cuh"
#include "cuda/decoder/softmax_stats.cuh"

namespace accumext::cuda {

constexpr int kMostBest = 64;   // k
constexpr int kBestBlocks = 2;  // of each multiprocessor, by the registers

// The search for the best `size` words of rows whose logits lie along the rows.
template <typename T>
struct Best {
  int size;        // k, at most kMostBest
  bool goes_on;    // whether only words behind those in `last` count
  Word<T>* last;   // [rows]: the last one that was found
  Word<T>* words;  // [rows, chunks, size]: the best of each chunk, in any order; 0: none
};

// The workspace of a search in bytes, and its pointers into one that begins at `memory`.
template <typename T>
size_t best_workspace(const Tiles& tiles, Best<T>& best, std::byte* memory) {
  best.last = reinterpret_cast<Word<T>*>(memory);
  best.words = best.last + tiles.rows;
  return (tiles.rows + tiles.rows * tiles.chunks() * best.size) * sizeof(Word<T>);
}

// Writes best.words, and peak, at and sum of every chunk.
//
//   grid    rows times any      block   kBlockSize threads, over a chunk at a time
//   reads   logits, T, [rows, columns], once: 4 or 8 bytes per element; bias, T, [columns]; last
//   writes  words, 8 or 16 bytes, [rows, chunks, k]; peak, at, sum: 16 to 20 bytes per chunk of a
//           row, which is kTileSize columns
template <typename T>
__global__ void __launch_bounds__(kBlockSize, kBestBlocks)
    best_of_chunks_kernel(Softmax<T> call, Best<T> best) {
  __shared__ Selection selection;
  __shared__ uint32_t found;
  const Place place(call.tiles);
  for (int64_t chunk = place.slot; chunk < call.tiles.chunks(); chunk += place.slots) {
    const int left = columns_left(call, place, chunk);
    T z[kPerThread];
    load_tile<kWidth<T>>(call, place, chunk, left, 0, z);
    if (!best.goes_on) write_chunk<kWidth<T>>(call, place, chunk, z);
    Key<T> keys[kPerThread];
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const int column = place.column_of<kWidth<T>>(n);
      keys[n] = column < left ? key_of(z[n]) : 0;
      const Word<T> word = word_of<T>(keys[n], chunk * kTileSize + column);
      if (best.goes_on && word >= best.last[place.row]) keys[n] = 0;
    }
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int n = 0; n < kPerThread; ++n) {
        const int64_t column = chunk * kTileSize + place.column_of<kWidth<T>>(n);
        if (keys[n] != 0) f(word_of<T>(keys[n], column));
      }
    };
    if (threadIdx.x == 0) found = 0;
    const Word<T> least = least_of_largest<T, kBlockSize>(selection, best.size, each,
                                                          [](Word<T>) { return uint64_t{1}; });
    Word<T>* const words = best.words + call.index(place.band, chunk) * best.size;
    each([&](Word<T> word) {
      if (word >= least) words[atomicAdd(&found, 1u)] = word;
    });
    __syncthreads();
    for (int i = static_cast<int>(found + threadIdx.x); i < best.size; i += kBlockSize)
      words[i] = 0;
    __syncthreads();
  }
}

template <typename T>
struct RowStats {
  Peak<T> peak;  // at: its chunk
  double total;  // sum of exp(z - peak)
};

// Of a row of chunks. Every thread must call it.
template <typename T>
__device__ RowStats<T> stats_of_row(const Softmax<T>& call, int64_t row) {
  __shared__ RowStats<T> of_row;
  if (threadIdx.x < kWarpSize) {
    const int64_t first = call.index(row, 0);
    const int chunks = static_cast<int>(call.tiles.chunks());
    Peak<T> peak{T(-INFINITY), INT_MAX};
    for (int i = lane(); i < chunks; i += kWarpSize) {
      peak = combined(peak, Peak<T>{call.peak[first + i], i});
    }
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      peak = combined(peak, Peak<T>{__shfl_xor_sync(kAllLanes, peak.value, distance),
                                    __shfl_xor_sync(kAllLanes, peak.at, distance)});
    }
    double total = 0.0;
    for (int i = lane(); i < chunks; i += kWarpSize) {
      const double depth = static_cast<double>(call.peak[first + i]) - double{peak.value};
      total += call.sum[first + i] * std::exp(depth);
    }
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(kAllLanes, total, distance);
    }
    if (lane() == 0) of_row = {peak, total};
  }
  __syncthreads();
  return of_row;
}

// Writes the results of a row, with all threads of a block; `token` is that of the first one.
template <typename T>
__device__ void finish_row(const Softmax<T>& call, const Rows<T>& rows, const FeedBack& feed_back,
                           int64_t row, const RowStats<T>& stats, int64_t token) {
  __shared__ Fed fed;
  if (threadIdx.x == 0) {
    // A row that is no distribution takes the argmax.
    if (!(std::abs(stats.peak.value) < T(INFINITY))) {
      const int at = call.at[call.index(row, stats.peak.at)];
      token = stats.peak.at * call.tiles.width() + at;
    }
    fed = write_row(rows, feed_back, row, token, stats.peak.value, stats.total,
                    call.logit(row, token));
  }
  if (feed_back.later == 0) return;
  __syncthreads();
  if (threadIdx.x < kBlockSize) feed_back.lead_on(row, fed.token, fed.input);
}

// The best words of a row, best first, in shared memory.
template <typename T>
struct Sorted {
  Word<T> words[kMostBest];
};

// Finds them among those of the chunks. Every thread must call it.
template <typename T>
__device__ void sort_best(const Best<T>& best, const Tiles& tiles, int64_t row, Sorted<T>& sorted) {
  __shared__ Selection selection;
  __shared__ Word<T> any[kMostBest];
  __shared__ uint32_t found;
  const int64_t count = tiles.chunks() * best.size;
  const Word<T>* const words = best.words + row * count;
  const auto each = [&](const auto& f) {
    for (int64_t i = threadIdx.x; i < count; i += kBlockSize) {
      if (words[i] != 0) f(words[i]);
    }
  };
  if (threadIdx.x == 0) found = 0;
  const Word<T> least = least_of_largest<T, kBlockSize>(selection, best.size, each,
                                                        [](Word<T>) { return uint64_t{1}; });
  each([&](Word<T> word) {
    if (word >= least) any[atomicAdd(&found, 1u)] = word;
  });
  __syncthreads();
  if (threadIdx.x < found) {
    int rank = 0;
    for (uint32_t i = 0; i < found; ++i) rank += any[i] > any[threadIdx.x];
    sorted.words[rank] = any[threadIdx.x];
  }
  __syncthreads();
}

// Where the best words of rows go.
template <typename T>
struct BestRows {
  Matrix<T> logits;        // [rows, k]
  Matrix<int64_t> tokens;  // [rows, k]
  Matrix<T> stats;  // [2, rows]: peak, sum of exp(z - peak); not written if the search goes on
};

// From the results of best_of_chunks_kernel.
//
//   grid    rows      block   kBlockSize threads
//   reads   words, as often as the selection needs digits, [rows, chunks, k]; peak, sum
//   writes  logits, T, and tokens, int64, [rows, k]; stats, T, [2, rows]; last, [rows]
template <typename T>
__global__ void __launch_bounds__(kBlockSize, kBestBlocks)
    best_of_rows_kernel(Softmax<T> call, Best<T> best, BestRows<T> rows) {
  __shared__ Sorted<T> sorted;
  const int64_t row = blockIdx.x;
  sort_best(best, call.tiles, row, sorted);
  const int i = static_cast<int>(threadIdx.x);
  if (i < best.size) {
    *rows.logits.at(row, i) = logit_of<T>(sorted.words[i]);
    *rows.tokens.at(row, i) = column_of<T>(sorted.words[i]);
  }
  if (i == 0) best.last[row] = sorted.words[best.size - 1];
  if (best.goes_on) return;
  const RowStats<T> stats = stats_of_row(call, row);
  if (i > 0) return;
  *rows.stats.at(0, row) = stats.peak.value;
  *rows.stats.at(1, row) = static_cast<T>(stats.total);
}

// Draws a word of the fewest of the best ones whose share of all of them reaches top_p, by
// inversion in the order of the vocabulary. The result is that of the first thread.
template <typename T>
__device__ int64_t sample_of(const Sorted<T>& sorted, int size, double inverse_temperature,
                             double top_p, double uniform) {
  __shared__ double weights[kMostBest];
  __shared__ int in_order[kMostBest];
  __shared__ int count;
  __shared__ double kept;
  const int mine = static_cast<int>(threadIdx.x);
  if (mine < size) {
    const double peak = logit_of<T>(sorted.words[0]);
    weights[mine] =
        std::exp((double{logit_of<T>(sorted.words[mine])} - peak) * inverse_temperature);
  }
  __syncthreads();
  if (mine == 0) {
    double whole = 0.0;
    for (int i = 0; i < size; ++i) whole += weights[i];
    kept = weights[0];
    for (count = 1; count < size && kept < top_p * whole; ++count) kept += weights[count];
  }
  __syncthreads();
  if (mine < count) {
    int before = 0;
    for (int i = 0; i < count; ++i) {
      before += column_of<T>(sorted.words[i]) < column_of<T>(sorted.words[mine]);
    }
    in_order[before] = mine;
  }
  __syncthreads();
  if (mine > 0) return 0;
  int drawn = 0;
  double sum = 0.0;
  for (int i = 0; i < count && !(sum > uniform * kept); ++i) {
    const int next = in_order[i];
    sum += weights[next];
    if (weights[next] > 0.0) drawn = next;
  }
  return column_of<T>(sorted.words[drawn]);
}

// From the results of best_of_chunks_kernel.
//
//   grid    rows      block   kBlockSize threads
//   reads   words, as often as the selection needs digits, [rows, chunks, k]; peak, at, sum;
//           uniforms; one logit; with feed_back what softmax_rows_kernel does
//   writes  stats, T, [3, rows]; tokens, int64, [rows]; with feed_back what softmax_rows_kernel
//   does
template <typename T>
__global__ void __launch_bounds__(kBlockSize, kBestBlocks)
    sample_best_kernel(Softmax<T> call, Best<T> best, Rows<T> rows, FeedBack feed_back,
                       double inverse_temperature, double top_p) {
  __shared__ Sorted<T> sorted;
  const int64_t row = blockIdx.x;
  sort_best(best, call.tiles, row, sorted);
  const RowStats<T> stats = stats_of_row(call, row);
  const int64_t token =
      sample_of(sorted, best.size, inverse_temperature, top_p, rows.uniforms[row]);
  finish_row(call, rows, feed_back, row, stats, token);
}

}  // namespace accumext::cuda
