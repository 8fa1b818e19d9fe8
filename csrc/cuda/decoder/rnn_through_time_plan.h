// The layout of a layer's backward steps that have a GPU to themselves. No torch here, and no
// CUDA.
#pragma once

#include <cstdint>

#include "cuda/decoder/persistent_plan.h"

namespace accumext::cuda {

// The rows of the batch are cut into bands, each of which has as many blocks, and these share its
// units: only blocks of one band ever wait for each other.
struct ThroughTimePlan {
  int blocks = 0;        // 0: the steps do not fit
  int bands, members;    // blocks: bands times members
  int tiles;             // of kTileRows rows, a band
  int groups;            // of kRowGroup units, which a block owns
  int chunks;            // of the depth of the products, gates times units
  int64_t operand_size;  // elements of a rounded copy of the gates' gradients, of a band

  // Offsets in shared memory, in bytes.
  int64_t weight, parts, passing, meetings, shared_bytes;

  // Offsets in scratch memory, all of which is 0 when the kernel begins: a counter for each band,
  // and its `operands` of two steps.
  int64_t arrived, operands, scratch_bytes;

  ACCUMEXT_HOST_DEVICE int units() const { return groups * kRowGroup; }
  ACCUMEXT_HOST_DEVICE int rows() const { return tiles * kTileRows; }
};

namespace through_time {

constexpr int64_t kCounterStride = 128;  // bytes: a line of the cache for each band

// The plan with bands of so many tiles.
inline ThroughTimePlan plan_of(int tiles, int64_t batch, int64_t units, int64_t gates,
                               const DeviceLimits& device) {
  ThroughTimePlan plan{};
  plan.tiles = tiles;
  plan.bands = static_cast<int>((batch + plan.rows() - 1) / plan.rows());
  const int most = device.blocks / plan.bands;
  if (device.capability < 80 || most == 0) return plan;
  plan.groups = static_cast<int>(pad_to((units + most - 1) / most, kRowGroup) / kRowGroup);
  if (plan.groups > kCellRows / kRowGroup) return plan;
  plan.chunks = static_cast<int>(chunks_of(gates * units));
  plan.operand_size = int64_t{plan.rows()} * plan.chunks * kChunk;

  Room shared;
  plan.weight = shared.take(int64_t{plan.chunks} * plan.groups * 32 * 16);
  plan.parts = shared.take(kPersistentWarps * kTileRows * part_stride_of(plan.groups) * 4);
  plan.passing = shared.take(2 * plan.rows() * plan.units() * 4);
  plan.meetings = shared.take(8);
  plan.shared_bytes = shared.size();
  if (plan.shared_bytes > device.shared_bytes) return plan;

  Room scratch;
  plan.arrived = scratch.take(plan.bands * kCounterStride);
  plan.operands = scratch.take(2 * plan.bands * plan.operand_size * 2);
  plan.scratch_bytes = scratch.size();
  plan.members = static_cast<int>((units + plan.units() - 1) / plan.units());
  plan.blocks = plan.bands * plan.members;
  return plan;
}

}  // namespace through_time

// The plan of a layer; its blocks are 0 if the kernel cannot run it. Per step every block reads the
// gradients of its band from the L2 cache, so bands are as narrow as shared memory allows: with
// half as many rows a block keeps twice as much of the weight. limits(tiles): the kernel's limits.
template <typename Limits>
ThroughTimePlan through_time_plan(int64_t batch, int64_t units, int64_t gates,
                                  const Limits& limits) {
  ThroughTimePlan plan{};
  if (batch < 1 || batch > kMaxPersistentBatch) return plan;
  for (int tiles = 1; plan.blocks == 0 && tiles * kTileRows <= width_of(batch); tiles *= 2) {
    plan = through_time::plan_of(tiles, batch, units, gates, limits(tiles));
  }
  return plan;
}

}  // namespace accumext::cuda
