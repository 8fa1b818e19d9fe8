// The steps of a recurrent layer backward in one cooperative launch.
#pragma once

#include <cstdint>

#include "cuda/decoder/grid_barrier.cuh"
#include "cuda/decoder/rnn_gradient.cuh"
#include "cuda/decoder/rnn_through_time_plan.h"
#include "cuda/decoder/tile_mma.cuh"

namespace accumext::cuda {

// The work of one block: it owns some units of a band of rows. Their part of weight_hh stays in
// shared memory, and so do dh and dc. Per step the block computes the gradients of their gates,
// waits for those of the band's other blocks, and multiplies all of them with its weights.
template <typename T, int kTiles, CellKind kKind>
class RnnThroughTime {
 public:
  __device__ RnnThroughTime(const LayerGradient<float>& call, const AnyMatrix& weight,
                            const ThroughTimePlan& plan, std::byte* scratch)
      : call_(call),
        plan_(plan),
        first_unit_(blockIdx.x % plan.members * int64_t{plan.units()}),
        first_row_(band() * int64_t{plan.rows()}),
        rows_(static_cast<int>(call.batch - first_row_ < plan.rows() ? call.batch - first_row_
                                                                     : plan.rows())),
        operands_(reinterpret_cast<uint16_t*>(scratch + plan.operands) +
                  band() * 2 * plan.operand_size),
        barrier_(reinterpret_cast<unsigned long long*>(scratch + plan.arrived +
                                                       band() * through_time::kCounterStride),
                 in_shared<unsigned long long>(plan.meetings), plan.members) {
    load_weight(weight.as<const uint16_t>());
    each_unit([&](int i, int64_t row, int64_t unit) {
      passing(0)[i] = *call_.dh.at(row, unit);
      if constexpr (kKind == CellKind::kLstm) passing(1)[i] = *call_.dc.at(row, unit);
    });
  }

  __device__ void run() const {
    int64_t t = call_.steps - 1;
    UnitBefore<float> early = before_of_first(t);
#pragma unroll 1
    for (; t >= 0; --t) {
      go_back(t, early);
      barrier_.arrive();
      if (t > 0) early = before_of_first(t - 1);
      barrier_.wait();
      multiply(t);
      __syncthreads();
    }
    each_unit([&](int i, int64_t row, int64_t unit) {
      *call_.dh.at(row, unit) = passed_dh(0, i, row);
      if constexpr (kKind == CellKind::kLstm) *call_.dc.at(row, unit) = passed_dc(0, i, row);
    });
  }

 private:
  static constexpr int kSplits = kPersistentWarps / kTiles;  // of the depth: warps of a tile
  static constexpr int kGroups = kCellRows / kRowGroup;
  static constexpr int kInFlight = 12;  // chunks of the operands, of a warp

  template <typename V>
  __device__ static V* in_shared(int64_t place) {
    return reinterpret_cast<V*>(shared_memory() + place);
  }

  __device__ int64_t band() const { return blockIdx.x / plan_.members; }

  // dh, or dc, of the block's units: [rows, units].
  __device__ float* passing(int which) const {
    return in_shared<float>(plan_.passing) + which * plan_.rows() * plan_.units();
  }

  // The gates' gradients of a step, rounded, in the order of operand_place().
  __device__ uint16_t* operands(int64_t t) const { return operands_ + t % 2 * plan_.operand_size; }

  // Calls f(i, row, unit) for each unit that the thread owns; neighbours take neighbouring units.
  template <typename F>
  __device__ void each_unit(const F& f) const {
    for (int i = threadIdx.x; i < rows_ * plan_.units(); i += kBlockSize) {
      const int64_t unit = first_unit_ + i % plan_.units();
      if (unit < call_.units) f(i, first_row_ + i / plan_.units(), unit);
    }
  }

  // In octets, as a lane multiplies them: [chunks][groups][lanes]; 0 beyond the weight.
  __device__ void load_weight(const Matrix<const uint16_t>& weight) const {
    const int64_t depth = call_.gates * call_.units;
    const int count = plan_.chunks * kChunk * plan_.units();
    for (int i = threadIdx.x; i < count; i += kBlockSize) {
      const int row = i % plan_.units();
      const int column = i / plan_.units();
      const int64_t unit = first_unit_ + row;
      const bool exists = unit < call_.units && column < depth;
      const int group = column / kChunk * plan_.groups + row / kRowGroup;
      const int octet = group * kWarpSize + row % kRowGroup * 4 + column % kChunk / kOctet;
      in_shared<uint16_t>(plan_.weight)[octet * kOctet + column % kOctet] =
          exists ? *weight.at(unit, column) : 0;
    }
  }

  // The inputs of the thread's first unit in a step, read before the gradients are known.
  __device__ UnitBefore<float> before_of_first(int64_t t) const {
    const int row = threadIdx.x / plan_.units();
    const int64_t unit = first_unit_ + threadIdx.x % plan_.units();
    if (row >= rows_ || unit >= call_.units) return {};
    return unit_before<float, kKind>(call_.step(t), first_row_ + row, unit);
  }

  __device__ void go_back(int64_t t, const UnitBefore<float>& early) const {
    const Gradient<float> step = call_.step(t);
    each_unit([&](int i, int64_t row, int64_t unit) {
      const bool first = i == static_cast<int>(threadIdx.x);
      const UnitBefore<float> of = first ? early : unit_before<float, kKind>(step, row, unit);
      float dh = t + 1 == call_.steps ? passing(0)[i] : passed_dh(t + 1, i, row);
      float dc = 0.0f;
      if constexpr (kKind == CellKind::kLstm) {
        dc = t + 1 == call_.steps ? passing(1)[i] : passed_dc(t + 1, i, row);
      }
      unit_backward<kKind>(of, dh, dc, [&](int gate, float d_x, float d_h) {
        const int64_t column = gate * call_.units + unit;
        *step.d_x.at(row, column) = d_x;
        if (step.d_h.data != nullptr) *step.d_h.at(row, column) = d_h;
        operands(t)[operand_place<kTiles>(i / plan_.units(), static_cast<int>(column))] =
            operand_bits<T>(d_h);
      });
      passing(0)[i] = dh;
      if constexpr (kKind == CellKind::kLstm) passing(1)[i] = dc;
    });
  }

  // The gradient that step t sends to the state before it. Its product is a sum over the splits of
  // the depth, each of which has left the rows of all tiles: parts are [splits, kTiles * kTileRows,
  // stride].
  __device__ float passed_dh(int64_t t, int i, int64_t row) const {
    const int stride = part_stride_of(plan_.groups);
    const float* part =
        in_shared<float>(plan_.parts) + i / plan_.units() * stride + i % plan_.units();
    float product = *part;
    for (int split = 1; split < kSplits; ++split) {
      product += part[split * kTiles * kTileRows * stride];
    }
    return carried(call_.carry(t), row, passing(0)[i] + product);
  }

  __device__ float passed_dc(int64_t t, int i, int64_t row) const {
    return carried(call_.carry(t), row, passing(1)[i]);
  }

  __device__ void multiply(int64_t t) const {
    const int tile = warp_index() % kTiles;
    const Octet* const kept = in_shared<Octet>(plan_.weight) + lane();
    float* const part =
        in_shared<float>(plan_.parts) + warp_index() * kTileRows * part_stride_of(plan_.groups);
    multiply_tile<T, kGroups, kSplits, kInFlight>(
        part, part_stride_of(plan_.groups), warp_index() / kTiles, plan_.chunks, plan_.groups,
        [&](Octet(&x)[kInFlight][2], int first) {
          load_operands<kTiles, kSplits>(x, operands(t), tile, first, plan_.chunks);
        },
        [&](int chunk, int group) { return kept[(chunk * plan_.groups + group) * kWarpSize]; });
  }

  const LayerGradient<float>& call_;
  const ThroughTimePlan& plan_;
  int64_t first_unit_, first_row_;
  int rows_;  // of the batch, in the band
  uint16_t* operands_;
  GridBarrier barrier_;
};

// Steps of a layer backward, from the last to the first, with the gradients that the first sends
// back. All blocks run at the same time; those of a band have one barrier per step.
//
//   grid    plan.blocks, a cooperative launch    block   kBlockSize threads, with
//           plan.shared_bytes of dynamic shared memory
//   scratch plan.scratch_bytes, all 0
//   weight  [units, gates units], T
//   reads   once the weight; per step what rnn_gradient_kernel does, but for dh and dc; the gates'
//           gradients of all units of a band's rows, in 2 bytes, by each of its blocks, from the
//           L2 cache
//   writes  per step d_x, d_h and those gradients; at the end dh and dc
template <typename T, int kTiles>
__global__ void __launch_bounds__(kBlockSize, 1)
    rnn_through_time_kernel(const __grid_constant__ LayerGradient<float> call,
                            const AnyMatrix weight, const __grid_constant__ ThroughTimePlan plan,
                            std::byte* scratch) {
  switch (call.kind) {
    case CellKind::kGru:
      return RnnThroughTime<T, kTiles, CellKind::kGru>(call, weight, plan, scratch).run();
    case CellKind::kLstm:
      return RnnThroughTime<T, kTiles, CellKind::kLstm>(call, weight, plan, scratch).run();
    case CellKind::kRnnTanh:
      return RnnThroughTime<T, kTiles, CellKind::kRnnTanh>(call, weight, plan, scratch).run();
    default:
      return RnnThroughTime<T, kTiles, CellKind::kRnnRelu>(call, weight, plan, scratch).run();
  }
}

using ThroughTimeKernel = void (*)(LayerGradient<float>, AnyMatrix, ThroughTimePlan, std::byte*);

template <typename T>
ThroughTimeKernel rnn_through_time_kernel_of(int tiles) {
  switch (tiles) {
    case 1:
      return rnn_through_time_kernel<T, 1>;
    case 2:
      return rnn_through_time_kernel<T, 2>;
    default:
      return rnn_through_time_kernel<T, 4>;
  }
}

}  // namespace accumext::cuda
