// The recurrent layers inside the persistent kernel.
#pragma once

#include <cmath>

#include "cuda/decoder/persistent_memory.cuh"
#include "cuda/decoder/rnn_units.cuh"
#include "cuda/decoder/tile_mma.cuh"
#include "math/gates.h"

namespace accumext::cuda {

enum class Operand : int { kX, kH };

// A block's share of the units of every layer, all gates of a unit together. It takes
// `plan.units_per_pass` of them at a time: row `gate * units_per_pass + unit` of a pass is one gate
// of one unit. The warps take chunks of the products' depth in turn and leave their parts in shared
// memory, where advance() adds them up.
template <typename T, int kColumnTiles>
class PersistentCell {
 public:
  __device__ explicit PersistentCell(const PersistentMemory& memory)
      : memory_(memory),
        call_(memory.call),
        plan_(memory.plan),
        gates_(gate_count_of(call_.kind)),
        first_(share_begin(call_.units, blockIdx.x, plan_.blocks)),
        end_(share_begin(call_.units, blockIdx.x + int64_t{1}, plan_.blocks)),
        parts_(memory.in_shared<float>(plan_.hidden)),
        biases_(memory.in_shared<float>(plan_.biases)) {}

  // Once, by all threads: biases, and weights if they stay, to shared memory.
  __device__ void load_weights() const {
    for (int layer = 0; layer < call_.layers; ++layer) {
      for (int pass = 0; pass < plan_.passes; ++pass) {
        load_biases(layer, pass);
        if (!plan_.resident) continue;
        for (const Operand operand : {Operand::kX, Operand::kH}) {
          const OctetRows weight = weight_of(layer, operand);
          Octet* const kept = kept_octets(layer, pass, operand);
          const int64_t groups = chunks_of(depth(layer, operand)) * plan_.cell_groups;
          for (int64_t i = warp_index(); i < groups; i += kPersistentWarps) {
            const int64_t column = i / plan_.cell_groups * kChunk + lane_octet() * kOctet;
            const int64_t row =
                row_of(pass, static_cast<int>(i % plan_.cell_groups * kRowGroup) + lane_row());
            kept[i * kWarpSize + lane()] =
                row < 0 ? Octet{} : weight.get(row, static_cast<int>(column));
          }
        }
      }
    }
  }

  // The warps' parts of the product of a pass with x, or with h, of `step`. What a chunk needs of
  // kAtOnce column tiles is read while that before it is multiplied.
  __device__ void multiply(int layer, int pass, Operand operand, int64_t step) const {
    const int64_t chunks = chunks_of(depth(layer, operand));
    const Octet* kept = plan_.resident ? kept_octets(layer, pass, operand) : nullptr;
    float sums[kRowTiles][kColumnTiles][4] = {};
    Octet weight[kGroups];
    Octet x[kAtOnce];
    load_weight(weight, kept, layer, pass, operand, warp_index());
    load_batch(x, 0, layer, operand, step, warp_index());
#pragma unroll 1
    for (int64_t chunk = warp_index(); chunk < chunks; chunk += kPersistentWarps) {
      const int64_t next = chunk + kPersistentWarps;
      Octet next_weight[kGroups];
      load_weight(next_weight, kept, layer, pass, operand, next);
#pragma unroll
      for (int first = 0; first < kColumnTiles; first += kAtOnce) {
        const bool last = first + kAtOnce == kColumnTiles;
        Octet next_x[kAtOnce];
        load_batch(next_x, last ? 0 : first + kAtOnce, layer, operand, step, last ? next : chunk);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          if (2 * m >= plan_.cell_groups) break;
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            multiply_chunk<T>(sums[m][first + n], weight[2 * m], weight[2 * m + 1], x[n]);
          }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) x[n] = next_x[n];
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) weight[group] = next_weight[group];
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (2 * m + half >= plan_.cell_groups) continue;
        float* const row = part(operand, warp_index(), (2 * m + half) * kRowGroup + lane_row());
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          row[n * kTileColumns + 2 * lane_octet()] = sums[m][n][2 * half];
          row[n * kTileColumns + 2 * lane_octet() + 1] = sums[m][n][2 * half + 1];
        }
      }
    }
  }

  // The states of a pass after `step`, from the parts of both products.
  __device__ void advance(int layer, int pass, int64_t step) const {
    const int64_t first = first_ + pass * plan_.units_per_pass;
    for (int i = threadIdx.x; i < plan_.units_per_pass * plan_.width; i += kBlockSize) {
      const int column = i % plan_.width;
      const int64_t unit = first + i / plan_.width;
      if (column < call_.batch && unit < end_) {
        advance_unit(layer, pass, step, column, unit, i / plan_.width);
      }
    }
  }

  // Rounded copies of the states before the window, and 0 around them; every block its share.
  __device__ void round_states() const {
    const int64_t stride = plan_.operand_stride;
    const int64_t size = plan_.width * stride;
    for (int layer = 0; layer < call_.layers; ++layer) {
      for (int64_t i = blockIdx.x * int64_t{kBlockSize} + threadIdx.x; i < size;
           i += plan_.blocks * int64_t{kBlockSize}) {
        const int64_t b = i / stride;
        const int64_t unit = i % stride;
        const bool exists = b < call_.batch && unit < call_.units;
        memory_.operand(layer, call_.begin)[i] =
            exists ? operand_bits<T>(state(call_.layer[layer].h, call_.begin, b, unit)) : 0;
        memory_.operand(layer, call_.begin + 1)[i] = 0;
        if (call_.dropout_mask != nullptr && layer + 1 < call_.layers)
          memory_.dropped(layer)[i] = 0;
      }
    }
  }

 private:
  static constexpr int kRowTiles = kCellRows / kTileRows;

  static constexpr int kGroups = kCellRows / kRowGroup;
  static constexpr int kAtOnce = kColumnTiles < 4 ? kColumnTiles : 4;

  __device__ static int gate_count_of(CellKind kind) {
    return kind == CellKind::kGru ? 3 : kind == CellKind::kLstm ? 4 : 1;
  }

  __device__ int64_t depth(int layer, Operand operand) const {
    return operand == Operand::kX && layer == 0 ? call_.inputs : call_.units;
  }

  __device__ OctetRows weight_of(int layer, Operand operand) const {
    const PersistentLayer& of = call_.layer[layer];
    return {operand == Operand::kX ? of.weight_ih : of.weight_hh, gates_ * call_.units,
            depth(layer, operand)};
  }

  // The row of a weight that is row `row` of a pass; -1: none.
  __device__ int64_t row_of(int pass, int row) const {
    const int gate = row / plan_.units_per_pass;
    const int64_t unit = first_ + int64_t{pass} * plan_.units_per_pass + row % plan_.units_per_pass;
    return gate < gates_ && unit < end_ ? gate * call_.units + unit : -1;
  }

  // Octets that stay: [layers][passes][chunks of x, then of h][cell_groups][lanes].
  __device__ Octet* kept_octets(int layer, int pass, Operand operand) const {
    Octet* octets = memory_.in_shared<Octet>(plan_.cells);
    for (int l = 0; l < layer; ++l) {
      octets += plan_.passes * octets_of_pass(plan_, depth(l, Operand::kX), call_.units);
    }
    octets += pass * octets_of_pass(plan_, depth(layer, Operand::kX), call_.units);
    if (operand == Operand::kX) return octets;
    return octets + chunks_of(depth(layer, Operand::kX)) * plan_.cell_groups * kWarpSize;
  }

  __device__ float& bias(int layer, int pass, Operand operand, int row) const {
    const int rows = plan_.cell_groups * kRowGroup;
    return biases_[((layer * plan_.passes + pass) * 2 + static_cast<int>(operand)) * rows + row];
  }

  __device__ void load_biases(int layer, int pass) const {
    for (const Operand operand : {Operand::kX, Operand::kH}) {
      const PersistentLayer& of = call_.layer[layer];
      const AnyVector& biases = operand == Operand::kX ? of.bias_ih : of.bias_hh;
      for (int i = threadIdx.x; i < plan_.cell_groups * kRowGroup; i += kBlockSize) {
        const int64_t row = row_of(pass, i);
        bias(layer, pass, operand, i) =
            row < 0 || biases.data == nullptr ? 0.0f : element(biases, row);
      }
    }
  }

  // A warp's part of a row of a product: [width].
  __device__ float* part(Operand operand, int warp, int row) const {
    const int rows = plan_.cell_groups * kRowGroup;
    const int warps = static_cast<int>(operand) * kPersistentWarps + warp;
    return parts_ + (warps * rows + row) * plan_.width;
  }

  // A chunk of the rows of a pass; nothing beyond the last chunk.
  __device__ void load_weight(Octet (&weight)[kGroups], const Octet* kept, int layer, int pass,
                              Operand operand, int64_t chunk) const {
    if (chunk >= chunks_of(depth(layer, operand))) return;
    const int column = column_of(chunk);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      weight[group] = {};
      if (group >= plan_.cell_groups) continue;
      if (kept != nullptr) {
        weight[group] = kept[(chunk * plan_.cell_groups + group) * kWarpSize + lane()];
      } else {
        const int64_t row = row_of(pass, group * kRowGroup + lane_row());
        if (row >= 0) weight[group] = weight_of(layer, operand).get(row, column);
      }
    }
  }

  // A chunk of rows 8 n + g of the batch, n from `first` on; beyond B anything, for those sums are
  // no one's. Nothing beyond the last chunk.
  __device__ void load_batch(Octet (&x)[kAtOnce], int first, int layer, Operand operand,
                             int64_t step, int64_t chunk) const {
    if (chunk >= chunks_of(depth(layer, operand))) return;
    const int row = first * kTileColumns + lane_row();
    if (operand == Operand::kX && layer == 0) return look_up(x, row, column_of(chunk));
    const uint16_t* from = memory_.operand(layer, step);
    if (operand == Operand::kX) {
      const bool drops = call_.dropout_mask != nullptr;
      from = drops ? memory_.dropped(layer - 1) : memory_.operand(layer - 1, step + 1);
    }
    from += row * plan_.operand_stride + column_of(chunk);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n, from += kTileColumns * plan_.operand_stride) {
      x[n] = load_shared_between_blocks(reinterpret_cast<const Octet*>(from));
    }
  }

  __device__ static int column_of(int64_t chunk) {
    return static_cast<int>(chunk) * kChunk + lane_octet() * kOctet;
  }

  __device__ void look_up(Octet (&x)[kAtOnce], int row, int column) const {
    const AnyMatrix& table = call_.table;
    with_type(table.dtype, [&](auto type) {
      using scalar_t = decltype(type);
      const auto* data = static_cast<const scalar_t*>(table.data);
      const auto from = [&](int n) {
        const int64_t b = n * kTileColumns + row;
        return data + memory_.row(b < call_.batch ? b : 0).fed * table.row_stride;
      };
      const bool aligned = reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
                           table.row_stride * sizeof(scalar_t) % kVectorBytes == 0;
      rounded_octets<T, scalar_t>(x, from, column, static_cast<int>(call_.inputs), aligned);
    });
  }

  __device__ float& state(float* states, int64_t step, int64_t b, int64_t unit) const {
    return states[(step * call_.batch + b) * call_.units + unit];
  }

  // One unit of a row of the batch; `place` among those of the pass.
  __device__ void advance_unit(int layer, int pass, int64_t step, int b, int64_t unit,
                               int place) const {
    const PersistentLayer& of = call_.layer[layer];
    const float h = state(of.h, step, b, unit);
    float next = h;
    float c = of.c == nullptr ? 0.0f : state(of.c, step, b, unit);
    if (memory_.row(b).live) {
      const auto sum = [&](Operand operand, int gate) {
        const int row = gate * plan_.units_per_pass + place;
        float total = part(operand, 0, row)[b];
        for (int warp = 1; warp < kPersistentWarps; ++warp) total += part(operand, warp, row)[b];
        return total + bias(layer, pass, operand, row);
      };
      const auto x = [&](int gate) { return sum(Operand::kX, gate); };
      const auto both = [&](int gate) { return x(gate) + sum(Operand::kH, gate); };
      switch (call_.kind) {
        case CellKind::kGru: {
          const float r = sigmoid(both(0));
          next = gru_state(sigmoid(both(1)), std::tanh(x(2) + r * sum(Operand::kH, 2)), h);
          break;
        }
        case CellKind::kLstm:
          c = lstm_memory(sigmoid(both(0)), sigmoid(both(1)), std::tanh(both(2)), c);
          next = sigmoid(both(3)) * std::tanh(c);
          break;
        case CellKind::kRnnTanh:
          next = std::tanh(both(0));
          break;
        case CellKind::kRnnRelu:
          next = both(0);
          next = next < 0 ? 0.0f : next;  // a NaN stays one
          break;
      }
    }
    state(of.h, step + 1, b, unit) = next;
    if (of.c != nullptr) state(of.c, step + 1, b, unit) = c;
    const int64_t at = b * plan_.operand_stride + unit;
    memory_.operand(layer, step + 1)[at] = operand_bits<T>(next);
    if (call_.dropout_mask != nullptr && layer + 1 < call_.layers) {
      const int64_t of_step = (step * (call_.layers - 1) + layer) * call_.batch + b;
      const bool keeps = call_.dropout_mask[of_step * call_.units + unit];
      memory_.dropped(layer)[at] = operand_bits<T>(keeps ? next * call_.dropout_scale : 0.0f);
    }
  }

  const PersistentMemory& memory_;
  const PersistentCall& call_;
  const PersistentPlan& plan_;
  int gates_;
  int64_t first_, end_;  // units
  float* parts_;
  float* biases_;
};

}  // namespace accumext::cuda
