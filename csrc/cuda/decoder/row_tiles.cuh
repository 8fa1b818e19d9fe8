// Tiles of neighbouring rows, each shared by the threads of a block; sums and largest elements of
// these rows, in an order that depends only on the tile.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "cuda/decoder/matrix.h"
#include "cuda/device.cuh"

namespace accumext::cuda {

constexpr int kPerThread = 16;  // elements of a tile for each thread, which stay in registers
constexpr int kTileSize = kBlockSize * kPerThread;
constexpr int kSectorBytes = 32;  // the smallest access of the memory
constexpr int kWarps = kBlockSize / kWarpSize;

template <typename T>
constexpr int kMaxHeight = kSectorBytes / sizeof(T);

// A matrix cut into tiles of `height` rows and kTileSize / height columns: a chunk of each row. A
// band is the tiles of the same rows.
struct Tiles {
  int64_t rows, columns;
  int32_t height;  // a power of two, at most kMaxHeight

  ACCUMEXT_HOST_DEVICE int64_t width() const { return kTileSize / height; }
  ACCUMEXT_HOST_DEVICE int64_t bands() const { return (rows + height - 1) / height; }
  ACCUMEXT_HOST_DEVICE int64_t chunks() const { return (columns + width() - 1) / width(); }
};

// Tiles have one row if columns are contiguous in every matrix of the call, so that neighbouring
// threads take neighbouring columns. Otherwise neighbouring threads take neighbouring rows, as many
// as fill a sector: higher tiles would cut each row into more chunks, and every block of the second
// launch reads the partial results of all chunks.
template <typename T>
Tiles tiles_of(int64_t rows, int64_t columns, const Matrix<const T>& logits,
               const AnyMatrix& exps) {
  const bool along = logits.column_stride == 1 && (exps.data == nullptr || exps.column_stride == 1);
  int32_t height = 1;
  while (!along && height < rows && height < kMaxHeight<T>) height *= 2;
  return {rows, columns, height};
}

// Tells whether vectors of kCount columns are aligned in each row.
template <int kCount, typename T>
bool aligned_rows(const Matrix<T>& matrix, int64_t element_size) {
  const int64_t bytes = std::min(kCount * element_size, kVectorBytes);
  return matrix.column_stride == 1 && reinterpret_cast<uintptr_t>(matrix.data) % bytes == 0 &&
         matrix.row_stride * element_size % bytes == 0;
}

// The place of a thread in its block, and of the block in the grid: one of the `slots` blocks that
// share the chunks of a band. In each chunk the thread takes every `turns`-th element, or vector,
// of one row.
struct Place {
  int64_t band, slot, slots;
  int64_t row;
  int in_tile;  // row of the tile
  int turn, turns;

  __device__ explicit Place(const Tiles& tiles) {
    const int64_t bands = tiles.bands();
    band = blockIdx.x % bands;  // so that concurrent blocks share cache lines
    slot = blockIdx.x / bands;
    slots = gridDim.x / bands;
    in_tile = static_cast<int>(threadIdx.x) % tiles.height;
    turn = static_cast<int>(threadIdx.x) / tiles.height;
    turns = kBlockSize / tiles.height;
    row = band * tiles.height + in_tile;
  }

  ACCUMEXT_HOST_DEVICE int height() const { return kBlockSize / turns; }

  // The column of the thread's n-th element, from the tile's first; kCount are neighbours.
  template <int kCount>
  __device__ int column_of(int n) const {
    return (n / kCount * turns + turn) * kCount + n % kCount;
  }
};

// --- what threads have of a row ------------------------------------------------------------------

template <typename T>
struct Peak {
  T value;
  int at;
};

// The larger one, a NaN before any number; of equal ones the first.
template <typename T>
__device__ Peak<T> combined(const Peak<T>& a, const Peak<T>& b) {
  const bool a_nan = a.value != a.value;
  const bool b_nan = b.value != b.value;
  const bool equal = a.value == b.value || (a_nan && b_nan);
  const bool second = equal ? b.at < a.at : !a_nan && (b_nan || b.value > a.value);
  return second ? b : a;
}

template <typename T>
__device__ Peak<T> from_below(const Peak<T>& x, int distance) {
  return {__shfl_down_sync(kAllLanes, x.value, distance),
          __shfl_down_sync(kAllLanes, x.at, distance)};
}

struct Sums {
  double plain, tempered;
};

__device__ inline Sums combined(const Sums& a, const Sums& b) {
  return {a.plain + b.plain, a.tempered + b.tempered};
}

__device__ inline Sums from_below(const Sums& x, int distance) {
  return {__shfl_down_sync(kAllLanes, x.plain, distance),
          __shfl_down_sync(kAllLanes, x.tempered, distance)};
}

// The term with which a running sum exceeds a threshold, and the sum before it.
struct Crossing {
  static constexpr int kNone = INT_MAX;
  static constexpr int kMissed = 1 << 30;

  int key;  // the term; or, if no term did, kNone - the last term that is not 0
  double before;

  __device__ bool exists() const { return key != kNone; }
  __device__ int term() const { return key < kMissed ? key : kNone - key; }
};

__device__ inline Crossing combined(const Crossing& a, const Crossing& b) {
  return b.key < a.key ? b : a;
}

__device__ inline Crossing from_below(const Crossing& x, int distance) {
  return {__shfl_down_sync(kAllLanes, x.key, distance),
          __shfl_down_sync(kAllLanes, x.before, distance)};
}

// Combines the values of all threads of a row; every thread of the block must call it, and has the
// result of its row.
template <typename V>
__device__ V row_combined(const Place& place, V mine) {
  __shared__ V of_warp[kWarps][kMaxHeight<float>];
  const int height = place.height();
  for (int distance = kWarpSize / 2; distance >= height; distance /= 2) {
    mine = combined(mine, from_below(mine, distance));
  }
  if (lane() < height) of_warp[threadIdx.x / kWarpSize][lane()] = mine;
  __syncthreads();
  V all = of_warp[0][place.in_tile];
  for (int warp = 1; warp < kWarps; ++warp) all = combined(all, of_warp[warp][place.in_tile]);
  __syncthreads();
  return all;
}

// --- running sums of a row's terms ---------------------------------------------------------------

// Calls f(i) for the thread's part of [0, n): parts are contiguous, in the order of the turns.
template <typename F>
__device__ void for_part(const Place& place, int n, const F& f) {
  const int size = (n + place.turns - 1) / place.turns;
  const int begin = place.turn * size;
  const int end = begin + size < n ? begin + size : n;
#pragma unroll 4
  for (int i = begin; i < end; ++i) f(i);
}

struct Prefix {
  double before;  // the sum of all terms before the thread's part
  double whole;   // the sum of all terms
};

// Sums up term(0), term(1), ... term(n - 1) for each row. Every thread must call it.
template <typename Term>
__device__ Prefix row_prefix(const Place& place, int n, const Term& term) {
  __shared__ double of_warp[kWarps][kMaxHeight<float>];
  const int height = place.height();
  double mine = 0.0;
  for_part(place, n, [&](int i) { mine += term(i); });
  for (int distance = height; distance < kWarpSize; distance *= 2) {
    const double other = __shfl_up_sync(kAllLanes, mine, distance);
    if (lane() >= distance) mine += other;
  }
  if (lane() >= kWarpSize - height) of_warp[threadIdx.x / kWarpSize][place.in_tile] = mine;
  const double other = __shfl_up_sync(kAllLanes, mine, height);
  const double in_warp = lane() >= height ? other : 0.0;
  __syncthreads();
  Prefix prefix{0.0, 0.0};
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == static_cast<int>(threadIdx.x) / kWarpSize) prefix.before = prefix.whole + in_warp;
    prefix.whole += of_warp[warp][place.in_tile];
  }
  __syncthreads();
  return prefix;
}

// The first term with which the running sum exceeds the threshold; never a term of 0. The last such
// term if the sum, which is rounded in another order than the threshold, does not exceed it. Every
// thread must call it.
template <typename Term>
__device__ Crossing first_past(const Place& place, int n, double before, double threshold,
                               const Term& term) {
  Crossing passed{Crossing::kNone, 0.0};
  Crossing last = passed;
  double running = before;
  for_part(place, n, [&](int i) {
    const double x = term(i);
    if (x > 0.0) {
      last = {Crossing::kNone - i, running};
      if (!passed.exists() && running + x > threshold) passed = {i, running};
    }
    running += x;
  });
  return row_combined(place, passed.exists() ? passed : last);
}

}  // namespace accumext::cuda
