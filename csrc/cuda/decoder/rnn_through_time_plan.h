// How the steps of a layer backward are laid out over a GPU that keeps them to itself. No torch
// here, and no CUDA.
#pragma once

#include <cstdint>

#include "cuda/decoder/persistent_plan.h"

namespace accumext::cuda {

struct ThroughTimePlan {
  int blocks = 0;        // 0: the steps do not fit
  int groups;            // of kRowGroup units, which a block owns
  int chunks;            // of the depth of the products, gates times units
  int64_t operand_size;  // elements of a rounded copy of the gates' gradients

  // In shared memory, bytes from its beginning.
  int64_t weight, parts, passing, meetings, shared_bytes;

  // In scratch memory, all of which is 0 when the kernel begins: `operands`, of two steps.
  int64_t arrived, operands, scratch_bytes;

  ACCUMEXT_HOST_DEVICE int units() const { return groups * kRowGroup; }
};

// Its blocks are 0 where the kernel does not take it.
inline ThroughTimePlan through_time_plan(int64_t batch, int64_t units, int64_t gates,
                                         const DeviceLimits& device) {
  ThroughTimePlan plan{};
  if (device.capability < 80 || device.blocks < 1 || batch < 1 || batch > kMaxPersistentBatch) {
    return plan;
  }
  const int width = width_of(batch);
  const int64_t groups = pad_to((units + device.blocks - 1) / device.blocks, kRowGroup) / kRowGroup;
  if (groups > kCellRows / kRowGroup) return plan;
  plan.groups = static_cast<int>(groups);
  plan.chunks = static_cast<int>(chunks_of(gates * units));
  plan.operand_size = int64_t{width} * plan.chunks * kChunk;

  Room shared;
  plan.weight = shared.take(int64_t{plan.chunks} * plan.groups * 32 * 16);
  plan.parts = shared.take(kPersistentWarps * kTileRows * part_stride_of(plan.groups) * 4);
  plan.passing = shared.take(2 * width * plan.units() * 4);
  plan.meetings = shared.take(8);
  plan.shared_bytes = shared.size();
  if (plan.shared_bytes > device.shared_bytes) return plan;

  Room scratch;
  plan.arrived = scratch.take(8);
  plan.operands = scratch.take(2 * plan.operand_size * 2);
  plan.scratch_bytes = scratch.size();
  plan.blocks = static_cast<int>((units + plan.units() - 1) / plan.units());
  return plan;
}

}  // namespace accumext::cuda
