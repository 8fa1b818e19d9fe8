// The output layer of a loss of whole distributions, behind its products: sums over the logits of
// each chunk of a row, what follows for the row, its gradient. Four launches, whatever the shape.
#pragma once

#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/decoder/matrix.h"
#include "cuda/decoder/row_tiles.cuh"
#include "cuda/decoder/softmax_stats.cuh"
#include "cuda/device.cuh"
#include "math/distributions.h"

namespace accumext::cuda {

constexpr int kObjectiveBlocks = 2;  // of each multiprocessor: 128 registers per thread

struct ChunkSums {
  double of[kDistributionSums];
};

__device__ inline ChunkSums combined(ChunkSums a, const ChunkSums& b) {
#pragma unroll
  for (int s = 0; s < kDistributionSums; ++s) a.of[s] += b.of[s];
  return a;
}

__device__ inline ChunkSums from_below(ChunkSums x, int distance) {
#pragma unroll
  for (int s = 0; s < kDistributionSums; ++s) {
    x.of[s] = __shfl_down_sync(kAllLanes, x.of[s], distance);
  }
  return x;
}

// What the first kernel leaves of a chunk of a row. Sums are relative to the chunk's own peaks, or
// to 0 where a peak is -inf.
template <typename T>
struct ObjectiveChunk {
  ChunkSums sums;
  T peak, teacher_peak;
  int32_t at;  // the column of the peak, from the chunk's first
};

// What the second kernel leaves of a row.
template <typename T>
struct ObjectiveRow {
  T peak, teacher_peak;
  DistributionFactors<T> factors;
};

// A call. `kept` are the elements of model.logits, in whose place the gradient is kept in T until
// all that belongs to a word has been added up.
template <typename T>
struct Objective {
  Logits<T> model;
  Logits<T> teacher;  // of the same tiles; without logits: there is none
  Matrix<T> kept;     // [rows, columns]
  T inverse_temperature;
  ObjectiveChunk<T>* chunks;  // [bands, chunks, height]
  ObjectiveRow<T>* rows;      // [rows]
  DistributionRules rules;
  Column<const int64_t> targets;  // [rows]
  Column<const T> share;          // [rows]
  int64_t size;                   // of the words whose probabilities are given
  Matrix<const T> probabilities;  // [rows, size]
  Matrix<const int64_t> indices;  // [rows, size]; words outside [0, columns) have no gradient
  Column<int64_t> tokens;         // [rows]
  Matrix<T> stats;                // [5, rows], as head_objective of _operators.py
  AnyMatrix gradients;            // [rows, columns]

  // What it is asked for from row `first` on.
  Objective from(int64_t first) const {
    Objective rest = *this;
    rest.targets = targets.from(first);
    rest.share = share.from(first);
    rest.probabilities = probabilities.from_row(first);
    rest.indices = indices.from_row(first);
    rest.tokens = tokens.from(first);
    rest.stats.data = stats.at(0, first);
    rest.gradients = gradients.from_row(first);
    return rest;
  }

  __device__ bool teaches() const { return teacher.logits.data != nullptr; }
  __device__ bool has(int64_t column) const { return column >= 0 && column < model.tiles.columns; }
};

// The workspace of a call in bytes, and its pointers into one that begins at `memory`.
template <typename T>
int64_t objective_workspace(Objective<T>& call, std::byte* memory) {
  const int64_t bytes = call.model.index(call.model.tiles.bands(), 0) * sizeof(ObjectiveChunk<T>);
  call.kept = {const_cast<T*>(call.model.logits.data), call.model.logits.row_stride,
               call.model.logits.column_stride};
  call.chunks = reinterpret_cast<ObjectiveChunk<T>*>(memory);
  call.rows = reinterpret_cast<ObjectiveRow<T>*>(memory + bytes);
  return bytes + call.model.tiles.rows * sizeof(ObjectiveRow<T>);
}

// Of a word, from what both logits are above their peaks.
template <typename T>
__device__ DistributionTerms<T> terms_of(const Objective<T>& call, T d, T teacher) {
  DistributionTerms<T> word{};
  word.d = d;
  word.e = std::exp(d);
  word.log_tempered = d * call.inverse_temperature;
  word.tempered = call.inverse_temperature == T(1) ? word.e : std::exp(word.log_tempered);
  if (!call.teaches()) return word;
  word.log_teacher = teacher * call.inverse_temperature;
  word.teacher = std::exp(word.log_teacher);
  return word;
}

// The largest of the thread's row in a tile.
template <typename T, int kElements>
__device__ Peak<T> tile_peak(const Place& place, const T (&z)[kElements]) {
  Peak<T> mine{z[0], place.column_of<1>(0)};
#pragma unroll
  for (int n = 1; n < kElements; ++n) {
    mine = combined(mine, Peak<T>{z[n], place.column_of<1>(n)});
  }
  return row_combined(place, mine);
}

// call.chunks.
//
//   grid    tiles.bands() times any      block   kBlockSize threads, over a tile at a time
//   reads   logits, T, [rows, columns], of the model and of the teacher, once; both bias, [columns]
//   writes  chunks, 48 or 64 bytes per chunk of a row
template <typename T>
__global__ void __launch_bounds__(kBlockSize, kObjectiveBlocks)
    objective_chunks_kernel(Objective<T> call) {
  constexpr int kGroup = 4;  // terms that are added in T; from then on in double
  const Place place(call.model.tiles);
  for (int64_t chunk = place.slot; chunk < call.model.tiles.chunks(); chunk += place.slots) {
    const int left = columns_left(call.model, place, chunk);
    T z[kPerThread], teacher[kPerThread] = {};
    load_tile<1>(call.model, place, chunk, left, 0, z);
    const Peak<T> peak = tile_peak(place, z);
    Peak<T> teacher_peak{};
    if (call.teaches()) {
      load_tile<1>(call.teacher, place, chunk, left, 0, teacher);
      teacher_peak = tile_peak(place, teacher);
    }
    ChunkSums sums{};
#pragma unroll
    for (int n = 0; n < kPerThread; n += kGroup) {
      T group[kDistributionSums] = {};
#pragma unroll
      for (int i = n; i < n + kGroup; ++i) {
        add_terms(
            terms_of(call, z[i] - origin(peak.value), teacher[i] - origin(teacher_peak.value)),
            call.teaches(), group);
      }
#pragma unroll
      for (int s = 0; s < kDistributionSums; ++s) sums.of[s] += group[s];
    }
    sums = row_combined(place, sums);
    if (place.turn > 0) continue;
    call.chunks[call.model.index(place.band, chunk) + place.in_tile] = {
        sums, peak.value, teacher_peak.value, peak.at};
  }
}

// The sums of a chunk relative to the peaks of its row.
template <typename T>
__device__ ChunkSums rescaled(const Objective<T>& call, const ObjectiveChunk<T>& chunk, double peak,
                              double teacher_peak) {
  const double inverse = call.inverse_temperature;
  const double depth = chunk.peak - peak;  // -inf where there is no finite logit
  const double weight = std::exp(depth), tempered = std::exp(depth * inverse);
  const double (&of)[kDistributionSums] = chunk.sums.of;
  ChunkSums sums{};
  sums.of[kOfExp] = weight * of[kOfExp];
  sums.of[kOfProduct] = weight * (of[kOfProduct] + weighted(of[kOfExp], depth));
  sums.of[kOfTempered] = tempered * of[kOfTempered];
  if (!call.teaches()) return sums;
  const double above = (chunk.teacher_peak - teacher_peak) * inverse;
  const double below = (origin(chunk.peak) - peak) * inverse;
  const double teacher = std::exp(above);
  sums.of[kOfTeacher] = teacher * of[kOfTeacher];
  sums.of[kOfCross] = weighted(teacher, of[kOfCross] + weighted(of[kOfTeacher], above - below));
  return sums;
}

// call.rows, tokens and the first four stats.
//
//   grid    tiles.bands()      block   kBlockSize threads
//   reads   chunks; targets; share; probabilities, T, and indices, int64, [rows, size]; of logits
//           those of the targets and indices
//   writes  tokens, int64, [rows]; stats, T, [5, rows], but for the last; rows
template <typename T>
__global__ void __launch_bounds__(kBlockSize, kObjectiveBlocks)
    objective_rows_kernel(Objective<T> call) {
  const Place place(call.model.tiles);
  const Tiles& tiles = call.model.tiles;
  const ObjectiveChunk<T>* chunks = call.chunks + call.model.index(place.band, 0) + place.in_tile;
  Peak<T> peak{T(-INFINITY), INT_MAX}, teacher_peak = peak;
  for (int64_t chunk = place.turn; chunk < tiles.chunks(); chunk += place.turns) {
    const ObjectiveChunk<T>& one = chunks[chunk * tiles.height];
    peak = combined(peak, Peak<T>{one.peak, static_cast<int>(chunk)});
    teacher_peak = combined(teacher_peak, Peak<T>{one.teacher_peak, static_cast<int>(chunk)});
  }
  peak = row_combined(place, peak);
  teacher_peak = row_combined(place, teacher_peak);
  ChunkSums sums{};
  for (int64_t chunk = place.turn; chunk < tiles.chunks(); chunk += place.turns) {
    sums = combined(sums,
                    rescaled(call, chunks[chunk * tiles.height], peak.value, teacher_peak.value));
  }
  sums = row_combined(place, sums);
  const int64_t row = place.row;
  const double log_tempered = std::log(sums.of[kOfTempered]);
  Sums given{};  // divergence and mass
  for (int64_t k = place.turn; row < tiles.rows && k < call.size; k += place.turns) {
    const double q = *call.probabilities.at(row, k);
    const int64_t column = *call.indices.at(row, k);
    const T z = call.has(column) ? call.model.logit(row, column) : T(NAN);
    const double log_p = (z - peak.value) * double{call.inverse_temperature} - log_tempered;
    given = combined(given, Sums{divergence_term(q, log_p), q});
  }
  given = row_combined(place, given);
  if (place.turn > 0 || row >= tiles.rows) return;
  const Distribution found = distribution_of(sums.of, peak.value, call.share[row], call.teaches(),
                                             given.plain, given.tempered, call.rules);
  const DistributionFactors<double>& factors = found.factors;
  call.rows[row] = {peak.value,
                    teacher_peak.value,
                    {static_cast<T>(factors.of_exp), static_cast<T>(factors.of_product),
                     static_cast<T>(factors.of_tempered), static_cast<T>(factors.of_teacher)}};
  call.tokens[row] = peak.at * tiles.width() + chunks[peak.at * int64_t{tiles.height}].at;
  const int64_t target = call.targets[row];
  *call.stats.at(0, row) = static_cast<T>(found.lse);
  *call.stats.at(1, row) = call.has(target) ? call.model.logit(row, target) : T(NAN);
  *call.stats.at(2, row) = static_cast<T>(found.entropy);
  *call.stats.at(3, row) = static_cast<T>(found.divergence);
}

// The gradient but for the words whose probabilities are given, to `kept` and to `gradients`.
//
//   grid    tiles.bands() times any      block   kBlockSize threads, over a tile at a time
//   reads   rows; logits, T, [rows, columns], of the model and of the teacher; both bias, [columns]
//   writes  kept, T, in place of the model's logits; gradients, any dtype, [rows, columns]
template <typename T>
__global__ void __launch_bounds__(kBlockSize, kObjectiveBlocks)
    objective_gradients_kernel(Objective<T> call) {
  constexpr int kPart = 4;  // elements in flight
  const Place place(call.model.tiles);
  const ObjectiveRow<T> its =
      place.row < call.model.tiles.rows ? call.rows[place.row] : ObjectiveRow<T>{};
  with_type(call.gradients.dtype, [&](auto type) {
    using gradient_t = decltype(type);
    const Matrix<gradient_t> gradients = call.gradients.template as<gradient_t>();
#pragma unroll 1
    for (int64_t chunk = place.slot; chunk < call.model.tiles.chunks(); chunk += place.slots) {
      const int left = columns_left(call.model, place, chunk);
      const int64_t begin = chunk * call.model.tiles.width();
#pragma unroll 1
      for (int part = 0; part < kPerThread; part += kPart) {
        T z[kPart], teacher[kPart] = {};
        load_tile<1>(call.model, place, chunk, left, part, z);
        if (call.teaches()) load_tile<1>(call.teacher, place, chunk, left, part, teacher);
#pragma unroll
        for (int n = 0; n < kPart; ++n) {
          const int column = place.column_of<1>(part + n);
          if (column >= left) continue;
          const auto word = terms_of(call, z[n] - its.peak, teacher[n] - its.teacher_peak);
          const T g = distribution_gradient(word, call.teaches(), its.factors);
          *call.kept.at(place.row, begin + column) = g;
          *gradients.at(place.row, begin + column) = rounded<gradient_t>(g);
        }
      }
    }
  });
}

// The gradients of the words whose probabilities are given, in their order, and of the target. A
// row's words are taken kBlockSize at a time; of those that are the same word, its first thread
// adds up all. Where they ascend, as all words of a vocabulary do, no two are the same.
//
//   grid    rows      block   kBlockSize threads
//   reads   probabilities, T, and indices, int64, [rows, size]; targets
//   writes  of kept and gradients the elements at the indices; the last of stats; 0 to gradients at
//           the target
template <typename T>
__global__ void __launch_bounds__(kBlockSize) objective_words_kernel(Objective<T> call) {
  __shared__ int64_t words[kBlockSize];
  __shared__ T shares[kBlockSize];
  const Place place(Tiles{call.model.tiles.rows, call.model.tiles.columns, 1});
  const int64_t row = place.row;
  const T scale = static_cast<T>(call.rules.soft_scale);
  int descends = 0;
  for (int64_t k = threadIdx.x + int64_t{1}; k < call.size; k += kBlockSize) {
    if (*call.indices.at(row, k) <= *call.indices.at(row, k - 1)) descends = 1;
  }
  const bool repeats = row_combined(place, Peak<int>{descends, 0}).value != 0;
  with_type(call.gradients.dtype, [&](auto type) {
    using gradient_t = decltype(type);
    const Matrix<gradient_t> gradients = call.gradients.template as<gradient_t>();
    for (int64_t first = 0; first < call.size; first += kBlockSize) {
      const int64_t k = first + threadIdx.x;
      const int64_t word = k < call.size ? *call.indices.at(row, k) : -1;
      const T share = k < call.size ? scale * *call.probabilities.at(row, k) : T(0);
      bool mine = call.has(word);
      if (repeats) {
        words[threadIdx.x] = word;
        shares[threadIdx.x] = share;
        __syncthreads();
        for (int i = 0; i < static_cast<int>(threadIdx.x); ++i) mine = mine && words[i] != word;
      }
      if (mine) {
        T g = *call.kept.at(row, word) - share;
        for (int i = threadIdx.x + 1; repeats && i < kBlockSize; ++i) {
          if (words[i] == word) g -= shares[i];
        }
        *call.kept.at(row, word) = g;
        *gradients.at(row, word) = rounded<gradient_t>(g);
      }
      if (repeats) __syncthreads();
    }
    __syncthreads();
    const int64_t target = call.targets[row];
    if (threadIdx.x > 0) return;
    *call.stats.at(4, row) = call.has(target) ? *call.kept.at(row, target) : T(NAN);
    if (call.has(target)) *gradients.at(row, target) = rounded<gradient_t>(T(0));
  });
}

}  // namespace accumext::cuda
