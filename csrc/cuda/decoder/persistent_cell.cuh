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
// of one unit. The warps of a tile of the batch take chunks of the products' depth in turn and
// leave their parts in shared memory, where advance() adds them up.
template <typename T, int kTiles>
class PersistentCell {
 public:
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

  // The warps' parts of the product of a pass with x, or with h, of `step`.
  __device__ void multiply(int layer, int pass, Operand operand, int64_t step) const {
    const int groups = plan_.cell_groups;
    if (plan_.resident) {
      const Octet* const kept = kept_octets(layer, pass, operand) + lane();
      multiply<kInFlight>(layer, operand, step, [=](int chunk, int group) {
        return kept[(chunk * groups + group) * kWarpSize];
      });
    } else {
      const OctetRows weight = weight_of(layer, operand);
      int64_t rows[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        rows[group] = row_of(pass, group * kRowGroup + lane_row());
      }
      multiply<kInFlight / 4>(layer, operand, step, [&](int chunk, int group) {
        return rows[group] < 0 ? Octet{} : weight.get(rows[group], column_of(chunk));
      });
    }
  }

  // The states of a pass after `step`, from the parts of both products. Neighbouring threads take
  // neighbouring units.
  __device__ void advance(int layer, int pass, int64_t step) const {
    const int units = plan_.units_per_pass;
    const int first = memory_.begin_unit + pass * units;
    for (int i = threadIdx.x; i < units * kWidth; i += kBlockSize) {
      const int b = i / units;
      const int place = i % units;
      if (b < call_.batch && first + place < memory_.end_unit) {
        advance_unit(layer, pass, step, b, first + place, place);
      }
    }
  }

  // Rounded copies of the states before the window, and 0 around them; every block its share.
  __device__ void round_states() const {
    const int64_t depth = chunks_of(call_.units) * kChunk;
    for (int layer = 0; layer < call_.layers; ++layer) {
      for (int64_t i = blockIdx.x * int64_t{kBlockSize} + threadIdx.x; i < plan_.operand_size;
           i += plan_.blocks * int64_t{kBlockSize}) {
        const int b = static_cast<int>(i / depth);
        const int unit = static_cast<int>(i % depth);
        const int at = operand_place<kTiles>(b, unit);
        const bool exists = b < call_.batch && unit < call_.units;
        memory_.operand(layer, call_.begin)[at] =
            exists ? operand_bits<T>(state(call_.layer[layer].h, call_.begin, b, unit)) : 0;
        memory_.operand(layer, call_.begin + 1)[at] = 0;
        if (call_.dropout_mask != nullptr && layer + 1 < call_.layers)
          memory_.dropped(layer)[at] = 0;
      }
    }
  }

 private:
  static constexpr int kWidth = kTiles * kTileRows;  // PersistentPlan::width
  static constexpr int kGroups = kCellRows / kRowGroup;
  static constexpr int kSplits = kPersistentWarps / kTiles;  // of the depth: warps of a tile
  static constexpr int kInFlight = 8;                        // chunks of x, of a warp

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
    const int unit = memory_.begin_unit + pass * plan_.units_per_pass + row % plan_.units_per_pass;
    return gate < gates_ && unit < memory_.end_unit ? gate * call_.units + unit : -1;
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
    return memory_.in_shared<float>(
        plan_.biases)[((layer * plan_.passes + pass) * 2 + static_cast<int>(operand)) * rows + row];
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

  // A warp's part of a product: [kTileRows, part_stride], of the rows of its tile of the batch.
  __device__ float* part(Operand operand, int warp) const {
    const int parts = static_cast<int>(operand) * kPersistentWarps + warp;
    return memory_.in_shared<float>(plan_.hidden) + parts * kTileRows * plan_.part_stride();
  }

  // A warp takes one tile of the batch, and every kSplits-th of its chunks.
  template <int kAtOnce, typename Weight>  // Octet weight(int chunk, int group)
  __device__ void multiply(int layer, Operand operand, int64_t step, const Weight& weight) const {
    const int chunks = static_cast<int>(chunks_of(depth(layer, operand)));
    const auto load = [&](Octet(&x)[kAtOnce][2], int first) {
      if (operand == Operand::kX && layer == 0) {
        look_up(x, first);
      } else {
        load_operands<kTiles, kSplits>(x, states_of(layer, operand, step), tile(), first, chunks);
      }
    };
    multiply_tile<T, kGroups, kSplits, kAtOnce>(part(operand, warp_index()), plan_.part_stride(),
                                                warp_index() / kTiles, chunks, plan_.cell_groups,
                                                load, weight);
  }

  __device__ static int tile() { return warp_index() % kTiles; }

  // The rounded states that a product reads.
  __device__ const uint16_t* states_of(int layer, Operand operand, int64_t step) const {
    if (operand == Operand::kH) return memory_.operand(layer, step);
    if (call_.dropout_mask != nullptr) return memory_.dropped(layer - 1);
    return memory_.operand(layer - 1, step + 1);
  }

  __device__ static int column_of(int chunk) { return chunk * kChunk + lane_octet() * kOctet; }

  // The same for rows of the table; arbitrary ones beyond B, since nobody reads those sums.
  template <int kAtOnce>
  __device__ void look_up(Octet (&x)[kAtOnce][2], int first) const {
    constexpr int kPart = kAtOnce < 4 ? kAtOnce : 4;  // more wide elements need too many registers
    const int depth = static_cast<int>(call_.inputs);
    const auto fed = [&](int half) {
      const int b = tile() * kTileRows + half * kRowGroup + lane_row();
      return memory_.row(b < call_.batch ? b : 0).fed;
    };
    const int64_t offsets[] = {fed(0) * call_.table.row_stride, fed(1) * call_.table.row_stride};
    with_type(call_.table.dtype, [&](auto type) {
      using scalar_t = decltype(type);
      const auto* data = static_cast<const scalar_t*>(call_.table.data);
      const bool aligned = reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
                           call_.table.row_stride * sizeof(scalar_t) % kVectorBytes == 0 &&
                           depth % kOctet == 0;
#pragma unroll
      for (int part = 0; part < kAtOnce; part += kPart) {
        const auto left = [&](int n) {
          return depth - column_of(first + (part + n / 2) * kSplits);
        };
        const auto from = [&](int n) {
          return data + offsets[n % 2] + (left(n) > 0 ? depth - left(n) : 0);
        };
        Octet rows[2 * kPart];
        rounded_octets<T, scalar_t>(rows, from, left, aligned);
#pragma unroll
        for (int n = 0; n < kPart; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t* const low = rows[2 * n].words + 2 * half;
            const uint32_t* const high = rows[2 * n + 1].words + 2 * half;
            x[part + n][half] = {low[0], high[0], low[1], high[1]};
          }
        }
      }
    });
  }

  __device__ float& state(float* states, int64_t step, int64_t b, int64_t unit) const {
    return states[(step * call_.batch + b) * call_.units + unit];
  }

  // Advances one unit of a row of the batch; `place` is its index in the pass.
  __device__ void advance_unit(int layer, int pass, int64_t step, int b, int unit,
                               int place) const {
    const PersistentLayer& of = call_.layer[layer];
    const float h = state(of.h, step, b, unit);
    float next = h;
    float c = of.c == nullptr ? 0.0f : state(of.c, step, b, unit);
    if (memory_.row(b).active) {
      const auto sum = [&](Operand operand, int gate) {
        const int row = gate * plan_.units_per_pass + place;
        const int at = b % kTileRows * plan_.part_stride() + row;
        float total = part(operand, b / kTileRows)[at];
        for (int split = 1; split < kSplits; ++split) {
          total += part(operand, split * kTiles + b / kTileRows)[at];
        }
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
    const int at = operand_place<kTiles>(b, unit);
    memory_.operand(layer, step + 1)[at] = operand_bits<T>(next);
    if (call_.dropout_mask != nullptr && layer + 1 < call_.layers) {
      const int64_t of_step = (step * (call_.layers - 1) + layer) * call_.batch + b;
      const bool keeps = call_.dropout_mask[of_step * call_.units + unit];
      memory_.dropped(layer)[at] = operand_bits<T>(keeps ? next * call_.dropout_scale : 0.0f);
    }
  }

  const PersistentMemory& memory_ = PersistentMemory::of_block();
  const PersistentCall& call_ = memory_.call;
  const PersistentPlan& plan_ = memory_.plan;
  int gates_ = gate_count_of(call_.kind);
};

}  // namespace accumext::cuda
