// The output layer after its product: partial results of each chunk of a row of logits, then the
// results of the row. Two launches for any shape.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/decoder/feed_back.cuh"
#include "cuda/decoder/matrix.h"
#include "cuda/decoder/row_tiles.cuh"
#include "cuda/device.cuh"

namespace accumext::cuda {

// Blocks of each multiprocessor: 80 registers per thread, of which its elements take up to 32. With
// at least 32 bytes in flight in each thread, 24 kB, they cover most of the latency of the memory:
// device.cuh, kInFlight.
constexpr int kSoftmaxBlocks = 3;

// Logits of rows, and how blocks share them.
template <typename T>
struct Logits {
  Matrix<const T> logits;  // [rows, columns], without
  Column<const T> bias;    // [columns], or null
  Tiles tiles;

  // The index in arrays with one element for each chunk of each row, [bands, chunks, height].
  ACCUMEXT_HOST_DEVICE int64_t index(int64_t band, int64_t chunk) const {
    return (band * tiles.chunks() + chunk) * tiles.height;
  }

  __device__ T logit(int64_t row, int64_t column) const {
    const T z = *logits.at(row, column);
    return bias.data == nullptr ? z : z + bias[column];
  }
};

// A call, and the results of its first kernel for its second. Sums are relative to the largest
// logit of their chunk, so that no term overflows; without a finite logit they are relative to 0.
template <typename T>
struct Softmax : Logits<T> {
  T inverse_temperature;
  // For each chunk of each row:
  double* sum;       // of exp(z - origin)
  double* tempered;  // of exp((z - origin) * inverse_temperature); null: equal to sum
  T* peak;           // the largest logit
  int32_t* at;       // its column, from the chunk's first
};

// The rows and results of the second kernel.
template <typename T>
struct Rows {
  // [rows]; a target outside [0, columns) has a logit of NaN. Null: the tokens, and the caller
  // clears exps.
  Column<const int64_t> targets;
  Column<const double> uniforms;  // [rows] in [0, 1): sample; null: take the argmax
  AnyMatrix exps;                 // [rows, columns]: exp(z - peak), 0 at the target; or null
  Column<int64_t> tokens;         // [rows]
  Matrix<T> stats;                // [3, rows]: peak, sum of exp(z - peak), target's logit

  // The same from row `first` on.
  Rows from(int64_t first) const {
    Matrix<T> its_stats = stats;
    its_stats.data = stats.at(0, first);
    return {targets.from(first), uniforms.from(first), exps.from_row(first), tokens.from(first),
            its_stats};
  }
};

// 1 / temperature, made neither infinite nor 0: 0 times it is 0, so that the smallest temperatures
// take the argmax, and -inf times it is -inf.
template <typename T>
T inverse_of(double temperature) {
  const double most = std::is_same_v<T, double> ? 0x1p1022 : 0x1p126;
  return static_cast<T>(std::clamp(1.0 / temperature, 1.0 / most, most));
}

// The workspace of a call in bytes, and its pointers into one that begins at `memory`.
template <typename T>
size_t softmax_workspace(Softmax<T>& call, bool tempered, std::byte* memory) {
  const int64_t count = call.tiles.bands() * call.tiles.chunks() * call.tiles.height;
  std::byte* next = memory;
  const auto take = [&]<typename V>(V*& pointer) {
    pointer = reinterpret_cast<V*>(next);
    next += count * sizeof(V);
  };
  take(call.sum);
  call.tempered = nullptr;
  if (tempered) take(call.tempered);
  take(call.peak);
  take(call.at);
  return next - memory;
}

// Tells whether threads move vectors of kWidth<T> columns.
template <typename T>
bool takes_vectors(const Softmax<T>& call, const AnyMatrix& exps) {
  return call.tiles.height == 1 && aligned_rows<kWidth<T>>(call.logits, sizeof(T)) &&
         (exps.data == nullptr ||
          aligned_rows<kWidth<T>>(exps.as<std::byte>(), size_of(exps.dtype)));
}

template <typename T>
__device__ T origin(T peak) {
  return peak == T(-INFINITY) ? T(0) : peak;
}

// The number of columns of a chunk that exist in the thread's row.
template <typename T>
__device__ int columns_left(const Logits<T>& call, const Place& place, int64_t chunk) {
  if (place.row >= call.tiles.rows) return 0;
  const int64_t left = call.tiles.columns - chunk * call.tiles.width();
  return static_cast<int>(left < call.tiles.width() ? left : call.tiles.width());
}

// The thread's logits of a tile from `first` on; -inf if there are none.
template <int kCount, typename T, int kElements>
__device__ void load_tile(const Logits<T>& call, const Place& place, int64_t chunk, int left,
                          int first, T (&z)[kElements]) {
  const int64_t begin = chunk * call.tiles.width();
  const T* from = call.logits.at(place.row, begin + place.column_of<kCount>(first));
  const int64_t step = place.turns * kCount * call.logits.column_stride;
#pragma unroll
  for (int n = 0; n < kElements; n += kCount, from += step) {
    const int column = place.column_of<kCount>(first + n);
    if (kCount > 1 && column + kCount <= left) {
      const auto vector = read<kCount>(from);
#pragma unroll
      for (int i = 0; i < kCount; ++i) z[n + i] = vector.get(i);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      z[n + i] = column + i < left ? from[i] : T(-INFINITY);
    }
  }
  if (call.bias.data == nullptr) return;
#pragma unroll
  for (int n = 0; n < kElements; ++n) {
    const int column = place.column_of<kCount>(first + n);
    if (column < left) z[n] += call.bias[begin + column];
  }
}

// The largest logit of a tile in the thread's row. Every thread must call it.
template <int kCount, typename T>
__device__ Peak<T> tile_peak(const Place& place, const T (&z)[kPerThread]) {
  Peak<T> mine{z[0], place.column_of<kCount>(0)};
#pragma unroll
  for (int n = 1; n < kPerThread; ++n) {
    mine = combined(mine, Peak<T>{z[n], place.column_of<kCount>(n)});
  }
  return row_combined(place, mine);
}

// Writes call.peak, at, sum and tempered for a chunk of the thread's row with these logits.
template <int kCount, typename T>
__device__ void write_chunk(const Softmax<T>& call, const Place& place, int64_t chunk,
                            const T (&z)[kPerThread]) {
  constexpr int kGroup = 4;  // terms that are added in T; from then on in double
  const Peak<T> peak = tile_peak<kCount>(place, z);
  const T from = origin(peak.value);
  Sums sums{};
#pragma unroll
  for (int n = 0; n < kPerThread; n += kGroup) {
    T sum = 0;
    T tempered = 0;
#pragma unroll
    for (int i = n; i < n + kGroup; ++i) {
      sum += std::exp(z[i] - from);
      if (call.tempered != nullptr) tempered += std::exp((z[i] - from) * call.inverse_temperature);
    }
    sums = combined(sums, Sums{sum, tempered});
  }
  sums = row_combined(place, sums);
  if (place.turn > 0) return;
  const int64_t i = call.index(place.band, chunk) + place.in_tile;
  call.peak[i] = peak.value;
  call.at[i] = peak.at;
  call.sum[i] = sums.plain;
  if (call.tempered != nullptr) call.tempered[i] = sums.tempered;
}

// Writes call.peak, at, sum and tempered for every chunk of every row.
//
//   grid    tiles.bands() times any      block   kBlockSize threads, over a tile at a time
//   reads   logits, T, [rows, columns], once: 4 or 8 bytes per element; bias, T, [columns]
//   writes  peak, at, sum, tempered, [bands, chunks, height]: 16 to 28 bytes per chunk of a row,
//           which is kTileSize / height columns
//   kCount: elements that a thread reads at once. A row's sum is formed in the order of the tile's
//   threads and chunks, which depends neither on the grid nor on the GPU.
template <typename T, int kCount>
__global__ void __launch_bounds__(kBlockSize, kSoftmaxBlocks)
    softmax_chunks_kernel(Softmax<T> call) {
  const Place place(call.tiles);
  for (int64_t chunk = place.slot; chunk < call.tiles.chunks(); chunk += place.slots) {
    T z[kPerThread];
    load_tile<kCount>(call, place, chunk, columns_left(call, place, chunk), 0, z);
    write_chunk<kCount>(call, place, chunk, z);
  }
}

// The largest logit of the thread's row, and the first chunk that has it.
template <typename T>
__device__ Peak<T> row_peak(const Softmax<T>& call, const Place& place) {
  const T* peak = call.peak + call.index(place.band, 0) + place.in_tile;
  Peak<T> mine{T(-INFINITY), INT_MAX};
  for (int64_t chunk = place.turn; chunk < call.tiles.chunks(); chunk += place.turns) {
    mine = combined(mine, Peak<T>{peak[chunk * call.tiles.height], static_cast<int>(chunk)});
  }
  return row_combined(place, mine);
}

// Draws by inversion: the first column at which the running sum of the tempered exponentials
// exceeds the uniform number times the whole sum. `weighted`, [chunks] with a stride of
// tiles.height, are the sums of the chunks. The argmax if logits are NaN: there is no such column.
template <typename T>
__device__ int64_t sampled(const Softmax<T>& call, const Place& place, double uniform,
                           const double* weighted, const Prefix& prefix, T peak, int64_t argmax) {
  const int chunks = static_cast<int>(call.tiles.chunks());
  const int width = static_cast<int>(call.tiles.width());
  const double threshold = uniform * prefix.whole;
  const Crossing in = first_past(place, chunks, prefix.before, threshold, [&](int chunk) {
    return weighted[int64_t{chunk} * call.tiles.height];
  });
  const int64_t chunk = in.exists() ? in.term() : 0;
  const T top = call.peak[call.index(place.band, chunk) + place.in_tile];
  const double weight = std::exp((static_cast<double>(top) - static_cast<double>(peak)) *
                                 static_cast<double>(call.inverse_temperature));
  const int64_t begin = chunk * width;
  const int64_t left = place.row < call.tiles.rows ? call.tiles.columns - begin : 0;
  const auto term = [&](int i) {
    if (i >= left) return 0.0;
    const T z = call.logit(place.row, begin + i) - origin(top);
    return static_cast<double>(std::exp(z * call.inverse_temperature));
  };
  const Prefix within = row_prefix(place, width, term);
  const Crossing found =
      first_past(place, width, within.before, (threshold - in.before) / weight, term);
  return in.exists() && found.exists() ? begin + found.term() : argmax;
}

struct Fed {
  int64_t token, input;  // of a step, and of the next one
};

// Writes the results of a row for its token, but for its row of the embedding in the next step.
template <typename T>
__device__ Fed write_row(const Rows<T>& rows, const FeedBack& feed_back, int64_t row, int64_t token,
                         T peak, double total, T logit) {
  if (!feed_back.is_live(row)) token = feed_back.pad;
  rows.tokens[row] = token;
  *rows.stats.at(0, row) = peak;
  *rows.stats.at(1, row) = static_cast<T>(total);
  *rows.stats.at(2, row) = logit;
  if (feed_back.rows != nullptr) feed_back.rows[row] = feed_back.first_row + row;
  if (feed_back.later == 0) return {token, token};
  return {token, feed_back.inputs[row] = feed_back.input(row, token)};
}

// A block's work for a band of rows: statistics, tokens, and the consequences of the tokens.
template <typename T>
__device__ void finish_band(const Softmax<T>& call, const Rows<T>& rows, const FeedBack& feed_back,
                            const Place& place, const Peak<T>& peak) {
  const int64_t first = call.index(place.band, 0);
  const int64_t count = call.index(place.band + 1, 0) - first;
  for (int64_t i = first + threadIdx.x; i < first + count; i += kBlockSize) {
    const double depth = static_cast<double>(call.peak[i]) - static_cast<double>(peak.value);
    call.sum[i] *= std::exp(depth);
    if (call.tempered == nullptr) continue;
    call.tempered[i] *= std::exp(depth * static_cast<double>(call.inverse_temperature));
  }
  __syncthreads();
  const auto prefix_of = [&](const double* sum) {
    const double* mine = sum + first + place.in_tile;
    return row_prefix(place, static_cast<int>(call.tiles.chunks()),
                      [&](int chunk) { return mine[int64_t{chunk} * call.tiles.height]; });
  };
  const Prefix prefix = prefix_of(call.sum);
  const bool exists = place.row < call.tiles.rows;
  int64_t token =
      peak.at * call.tiles.width() + call.at[call.index(place.band, peak.at) + place.in_tile];
  if (rows.uniforms.data != nullptr) {
    const double uniform = exists ? rows.uniforms[place.row] : 0.0;
    const double* sum = call.tempered != nullptr ? call.tempered : call.sum;
    token =
        sampled(call, place, uniform, sum + first + place.in_tile,
                call.tempered != nullptr ? prefix_of(call.tempered) : prefix, peak.value, token);
  }
  __shared__ Fed fed[kMaxHeight<float>];
  if (place.turn == 0 && exists) {
    const int64_t row = place.row;
    const int64_t target = rows.targets.data == nullptr ? token : rows.targets[row];
    const bool valid = target >= 0 && target < call.tiles.columns;
    fed[place.in_tile] = write_row(rows, feed_back, row, token, peak.value, prefix.whole,
                                   valid ? call.logit(row, target) : T(NAN));
  }
  if (feed_back.later == 0) return;
  __syncthreads();
  const int64_t top = place.row - place.in_tile;
  for (int i = 0; i < call.tiles.height && top + i < call.tiles.rows; ++i) {
    feed_back.lead_on(top + i, fed[i].token, fed[i].input);
  }
}

// A block's work for exps: the chunks first, first + step, ... of a band.
template <int kCount, typename T, typename exp_t>
__device__ void write_exps(const Softmax<T>& call, const Rows<T>& rows, const Place& place, T peak,
                           int64_t first, int64_t step, const Matrix<exp_t>& exps) {
  constexpr int kPart = 32 / sizeof(T);  // elements in flight
  const bool known = place.row < call.tiles.rows && rows.targets.data != nullptr;
  const int64_t target = known ? rows.targets[place.row] : -1;
  const int64_t stride = place.turns * kCount * exps.column_stride;
#pragma unroll 1
  for (int64_t chunk = first; chunk < call.tiles.chunks(); chunk += step) {
    const int left = columns_left(call, place, chunk);
    const int64_t begin = chunk * call.tiles.width();
    // A chunk has fewer columns than an int can count.
    const int zero =
        target >= begin && target < begin + left ? static_cast<int>(target - begin) : -1;
#pragma unroll 1
    for (int part = 0; part < kPerThread; part += kPart) {
      T z[kPart];
      load_tile<kCount>(call, place, chunk, left, part, z);
      exp_t* to = exps.at(place.row, begin + place.column_of<kCount>(part));
#pragma unroll
      for (int n = 0; n < kPart; n += kCount, to += stride) {
        const int column = place.column_of<kCount>(part + n);
        Vector<exp_t, kCount> e;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          e.set(i, rounded<exp_t>(column + i == zero ? T(0) : std::exp(z[n + i] - peak)));
        }
        if (column + kCount <= left) {
          write(to, e);
          continue;
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (column + i < left) to[i] = e.get(i);
        }
      }
    }
  }
}

// From the results of softmax_chunks_kernel, the first block of each band writes rows.stats, the
// tokens and their consequences; the others write rows.exps.
//
//   grid    tiles.bands(), times two or more if exps are wanted
//   block   kBlockSize threads
//   reads   peak, by each block those of its band; at, sum, tempered; targets, uniforms; of a
//   sample
//           a chunk of each row of logits, else one logit; for exps all of them, 4 or 8 bytes per
//           element, and bias; with feed_back active, bool, [rows], and of the next step active,
//           teacher and teacher_mask; rows of lookup.table
//   writes  stats, T, [3, rows]; tokens, int64, [rows]; exps, any dtype, [rows, columns], 2, 4 or 8
//           bytes per element, must not overlap logits; sum and tempered, as factors of a row's;
//           with feed_back rows, inputs and lookup.rows, and active of later steps if a row ends
template <typename T, int kCount>
__global__ void __launch_bounds__(kBlockSize, kSoftmaxBlocks)
    softmax_rows_kernel(Softmax<T> call, Rows<T> rows, FeedBack feed_back) {
  const Place place(call.tiles);
  const Peak<T> peak = row_peak(call, place);
  if (place.slot == 0) return finish_band(call, rows, feed_back, place, peak);
  with_type(rows.exps.dtype, [&](auto type) {
    write_exps<kCount>(call, rows, place, peak.value, place.slot - 1, place.slots - 1,
                       rows.exps.template as<decltype(type)>());
  });
}

}  // namespace accumext::cuda
