// The output layer of a loss of whole distributions, after its products: sums over the logits of
// each chunk of a row, the results of the row, its gradient. At most four launches for any shape.
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

struct ObjectiveSums {
  double of[kDistributionSums];
  // Sums over words whose probabilities q are given: of q log(q / exp(z / temperature)), of q, and
  // the number of times that a word comes after itself or after a later one.
  double given, mass, descents;
};

__device__ inline ObjectiveSums combined(ObjectiveSums a, const ObjectiveSums& b) {
#pragma unroll
  for (int s = 0; s < kDistributionSums; ++s) a.of[s] += b.of[s];
  a.given += b.given;
  a.mass += b.mass;
  a.descents += b.descents;
  return a;
}

__device__ inline ObjectiveSums from_below(ObjectiveSums x, int distance) {
  const auto shift = [&](double& sum) { sum = __shfl_down_sync(kAllLanes, sum, distance); };
#pragma unroll
  for (int s = 0; s < kDistributionSums; ++s) shift(x.of[s]);
  shift(x.given);
  shift(x.mass);
  shift(x.descents);
  return x;
}

// The first kernel's results for a chunk of a row. Sums are relative to the chunk's own peaks, or
// to 0 if a peak is -inf.
template <typename T>
struct ObjectiveChunk {
  ObjectiveSums sums;
  T peak, teacher_peak;
  int32_t at;  // the column of the peak, from the chunk's first
};

// The second kernel's results for a row.
template <typename T>
struct ObjectiveRow {
  T peak, teacher_peak;
  DistributionFactors<T> factors;
  bool ascends;  // whether the words with given probabilities ascend, so that no two are the same
};

// A call. `kept` has the memory of model.logits: the gradient replaces them, in T, until all
// contributions to a word have been added up.
template <typename T>
struct Objective {
  Logits<T> model;
  Logits<T> teacher;  // with the same tiles; without logits: none
  Matrix<T> kept;     // [rows, columns]
  T inverse_temperature;
  ObjectiveChunk<T>* chunks;  // [bands, chunks, height]
  ObjectiveRow<T>* rows;      // [rows]
  DistributionRules rules;
  Column<const int64_t> targets;  // [rows]
  Column<const T> share;          // [rows]
  int64_t size;                   // number of words whose probabilities are given
  Matrix<const T> probabilities;  // [rows, size]
  Matrix<const int64_t> indices;  // [rows, size]; words outside [0, columns) have no gradient
  Column<int64_t> tokens;         // [rows]
  Matrix<T> stats;                // [5, rows], as head_objective of _operators.py
  AnyMatrix gradients;            // [rows, columns]

  // The same call from row `first` on.
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

  // NaN if there is no such column.
  __device__ T logit(int64_t row, int64_t column) const {
    return has(column) ? model.logit(row, column) : T(NAN);
  }

  // Stores the gradient so far; at the target it is a statistic.
  template <typename gradient_t>
  __device__ void put(const Matrix<gradient_t>& to, int64_t row, int64_t column, int64_t target,
                      T gradient) const {
    *kept.at(row, column) = gradient;
    *to.at(row, column) = rounded<gradient_t>(column == target ? T(0) : gradient);
    if (column == target) *stats.at(4, row) = gradient;
  }
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

// The numbers of a word, from the differences of both logits from their peaks.
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

// Adds the given words of a chunk: as many as it has columns, or more if more words are given than
// there are columns.
template <typename T>
__device__ void add_given(const Objective<T>& call, const Place& place, int64_t chunk,
                          ObjectiveSums& sums) {
  const Tiles& tiles = call.model.tiles;
  const int64_t row = place.row;
  if (row >= tiles.rows) return;
  const double inverse = call.inverse_temperature;
  for (int64_t first = chunk * tiles.width(); first < call.size;
       first += tiles.chunks() * tiles.width()) {
#pragma unroll 2
    for (int n = 0; n < kPerThread; ++n) {
      const int64_t k = first + place.column_of<1>(n);
      if (k >= call.size) continue;
      const int64_t word = *call.indices.at(row, k);
      const double q = *call.probabilities.at(row, k);
      sums.given += divergence_term(q, call.logit(row, word) * inverse);
      sums.mass += q;
      if (k > 0 && word <= *call.indices.at(row, k - 1)) sums.descents += 1.0;
    }
  }
}

// Writes call.chunks.
//
//   grid    tiles.bands() times any      block   kBlockSize threads, over a tile at a time
//   reads   logits, T, [rows, columns], of the model and of the teacher, once; bias, [columns], of
//           both; probabilities, T, and indices, int64, [rows, size], and the logits of these
//   writes  chunks, 80 or 88 bytes per chunk of a row
template <typename T>
__global__ void __launch_bounds__(kBlockSize, kObjectiveBlocks)
    objective_chunks_kernel(Objective<T> call) {
  constexpr int kGroup = 4;  // terms that are added in T; from then on in double
  const Place place(call.model.tiles);
  for (int64_t chunk = place.slot; chunk < call.model.tiles.chunks(); chunk += place.slots) {
    const int left = columns_left(call.model, place, chunk);
    T z[kPerThread], teacher[kPerThread] = {};
    load_tile<1>(call.model, place, chunk, left, 0, z);
    const Peak<T> peak = tile_peak<1>(place, z);
    Peak<T> teacher_peak{};
    if (call.teaches()) {
      load_tile<1>(call.teacher, place, chunk, left, 0, teacher);
      teacher_peak = tile_peak<1>(place, teacher);
    }
    ObjectiveSums sums{};
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
    add_given(call, place, chunk, sums);
    sums = row_combined(place, sums);
    if (place.turn > 0) continue;
    call.chunks[call.model.index(place.band, chunk) + place.in_tile] = {
        sums, peak.value, teacher_peak.value, peak.at};
  }
}

// Converts the sums of a chunk to be relative to the peaks of its row.
template <typename T>
__device__ ObjectiveSums rescaled(const Objective<T>& call, const ObjectiveChunk<T>& chunk,
                                  double peak, double teacher_peak) {
  const double inverse = call.inverse_temperature;
  const double depth = chunk.peak - peak;  // -inf if there is no finite logit
  const double weight = std::exp(depth), tempered = std::exp(depth * inverse);
  const double (&of)[kDistributionSums] = chunk.sums.of;
  ObjectiveSums sums = chunk.sums;
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

// Writes call.rows, tokens and stats but for the last one, which the gradient gives.
//
//   grid    tiles.bands()      block   kBlockSize threads
//   reads   chunks; targets; share; of logits those of the targets
//   writes  tokens, int64, [rows]; stats, T, [5, rows]; rows
template <typename T>
__global__ void __launch_bounds__(kBlockSize) objective_rows_kernel(Objective<T> call) {
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
  ObjectiveSums sums{};
  for (int64_t chunk = place.turn; chunk < tiles.chunks(); chunk += place.turns) {
    sums = combined(sums,
                    rescaled(call, chunks[chunk * tiles.height], peak.value, teacher_peak.value));
  }
  sums = row_combined(place, sums);
  const int64_t row = place.row;
  if (place.turn > 0 || row >= tiles.rows) return;
  const double log_tempered =
      peak.value * double{call.inverse_temperature} + std::log(sums.of[kOfTempered]);
  const double given = sums.given + weighted(sums.mass, log_tempered);
  const Distribution found = distribution_of(sums.of, peak.value, call.share[row], call.teaches(),
                                             given, sums.mass, call.rules);
  const DistributionFactors<double>& factors = found.factors;
  call.rows[row] = {peak.value,
                    teacher_peak.value,
                    {static_cast<T>(factors.of_exp), static_cast<T>(factors.of_product),
                     static_cast<T>(factors.of_tempered), static_cast<T>(factors.of_teacher)},
                    sums.descents == 0.0};
  call.tokens[row] = peak.at * tiles.width() + chunks[peak.at * int64_t{tiles.height}].at;
  *call.stats.at(0, row) = static_cast<T>(found.lse);
  *call.stats.at(1, row) = call.logit(row, call.targets[row]);
  *call.stats.at(2, row) = static_cast<T>(found.entropy);
  *call.stats.at(3, row) = static_cast<T>(found.divergence);
  *call.stats.at(4, row) = T(NAN);
}

// Writes the gradient without the contributions of the given words.
//
//   grid    tiles.bands() times any      block   kBlockSize threads, over a tile at a time
//   reads   rows; targets; logits, T, [rows, columns], of the model and of the teacher; both bias
//   writes  kept, T, in place of the model's logits; gradients, any dtype, [rows, columns]; the
//           last of stats
template <typename T>
__global__ void __launch_bounds__(kBlockSize, kObjectiveBlocks)
    objective_gradients_kernel(Objective<T> call) {
  constexpr int kPart = 4;  // elements in flight
  const Place place(call.model.tiles);
  const bool exists = place.row < call.model.tiles.rows;
  const ObjectiveRow<T> its = exists ? call.rows[place.row] : ObjectiveRow<T>{};
  const int64_t target = exists ? call.targets[place.row] : -1;
  with_type(call.gradients.dtype, [&](auto type) {
    const auto gradients = call.gradients.template as<decltype(type)>();
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
          call.put(gradients, place.row, begin + column, target,
                   distribution_gradient(word, call.teaches(), its.factors));
        }
      }
    }
  });
}

// Adds the contributions of the given words to the gradient, in their order, kBlockSize of a row at
// a time. If words ascend, as all words of a vocabulary do, blocks share a row. Otherwise one block
// has it, and the first thread that has a word adds up the contributions of all others to it.
//
//   grid    rows times any      block   kBlockSize threads
//   reads   rows; targets; probabilities, T, and indices, int64, [rows, size]
//   writes  of kept and gradients the elements at the indices, and the last of stats
template <typename T>
__global__ void __launch_bounds__(kBlockSize) objective_given_kernel(Objective<T> call) {
  __shared__ int64_t words[kBlockSize];
  __shared__ T shares[kBlockSize];
  const int64_t row = blockIdx.x % call.model.tiles.rows;
  const int64_t slot = blockIdx.x / call.model.tiles.rows;
  const bool repeats = !call.rows[row].ascends;
  if (repeats && slot > 0) return;
  const int64_t slots = repeats ? 1 : gridDim.x / call.model.tiles.rows;
  const int64_t target = call.targets[row];
  const T scale = static_cast<T>(call.rules.soft_scale);
  const int mine = threadIdx.x;
  with_type(call.gradients.dtype, [&](auto type) {
    const auto gradients = call.gradients.template as<decltype(type)>();
    for (int64_t first = slot * kBlockSize; first < call.size; first += slots * kBlockSize) {
      const int64_t k = first + mine;
      const int64_t word = k < call.size ? *call.indices.at(row, k) : -1;
      const T share = k < call.size ? scale * *call.probabilities.at(row, k) : T(0);
      bool is_first = call.has(word);
      if (repeats) {
        words[mine] = word;
        shares[mine] = share;
        __syncthreads();
        for (int i = 0; i < mine; ++i) is_first = is_first && words[i] != word;
      }
      if (is_first) {
        T gradient = *call.kept.at(row, word) - share;
        for (int i = mine + 1; repeats && i < kBlockSize; ++i) {
          if (words[i] == word) gradient -= shares[i];
        }
        call.put(gradients, row, word, target, gradient);
      }
      if (repeats) __syncthreads();
    }
  });
}

}  // namespace accumext::cuda
