// The layout of a window of decoder steps that has a GPU to itself: the shares of blocks, and the
// places of data in shared and in scratch memory. No torch here, and no CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/decoder/persistent_call.h"
#include "cuda/device_limits.h"
#include "math/host_device.h"

namespace accumext::cuda {

constexpr int kMaxPersistentBatch = 64;
constexpr int kPersistentWarps = 8;
constexpr int kTileRows = 16;  // of the batch that one tensor-core operation multiplies
constexpr int kRowGroup = 8;   // rows of a weight that it multiplies them with
constexpr int kChunk = 32;     // elements of a row that a warp multiplies at once
constexpr int kCellRows = 32;  // of a cell's weights: as many as a warp has sums for
constexpr int kMinStages = 2;
constexpr int kMinStagesBesideCells = 3;
constexpr int kMaxStages = 8;

ACCUMEXT_HOST_DEVICE inline int64_t chunks_of(int64_t depth) {
  return (depth + kChunk - 1) / kChunk;
}

// Floats from a row of the batch to the next in a warp's part of a product with so many groups of
// rows. The number of groups is made odd, so that a warp's accesses have no bank conflicts.
ACCUMEXT_HOST_DEVICE inline int part_stride_of(int groups) { return (groups | 1) * kRowGroup; }

// The begin of the share of `block` if `blocks` share `count` evenly.
ACCUMEXT_HOST_DEVICE inline int64_t share_begin(int64_t count, int64_t block, int64_t blocks) {
  return count * block / blocks;
}

// The statistics of a block's logits of a row; each reader sums them up.
struct PersistentShare {
  double sum, tempered;  // of exp(z - peak), and of exp((z - peak) / temperature)
  float peak;
};

// The state of a row of the batch, of which every block has a copy.
struct PersistentRow {
  int64_t fed;     // the input of the next step
  int64_t target;  // of the step whose logits are known
  float peak;      // of that step
  bool active, ended;
};

struct PersistentPlan {
  int blocks = 0;  // 0: the window does not fit
  int width;       // of the batch: width_of()
  int task_rows;   // of the head's weight that a warp multiplies at once with the hidden states
  int stages;      // chunks of that weight that are in flight to a warp
  bool resident;   // whether the cells' weights stay in shared memory
  // A block goes through its units `units_per_pass` at a time; the rows of their gates are padded
  // to `cell_groups` groups of kRowGroup.
  int passes, units_per_pass, cell_groups;
  int64_t operand_size;  // elements of a rounded copy of h: width rows of whole chunks
  float kept;            // fraction of the head's weight to keep in the L2 cache

  // Offsets in shared memory, in bytes. The warps' parts of the cells' products and of the logits'
  // statistics also use `hidden`, at other times.
  int64_t cells, hidden, stream, biases, rows, meetings, shared_bytes;

  // Offsets in scratch memory. `arrived` and `keys`, `zeroed` bytes, are 0 when the kernel begins.
  int64_t arrived, keys, zeroed, sampled, operands, dropped, shares, logits, scratch_bytes;

  int gates_rows(CellKind kind) const { return gate_count(kind) * units_per_pass; }

  ACCUMEXT_HOST_DEVICE int part_stride() const { return part_stride_of(cell_groups); }
};

inline int64_t pad_to(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// Allocates memory for one thing after the other.
class Room {
 public:
  int64_t take(int64_t bytes) {
    const int64_t begin = size_;
    size_ = pad_to(begin + bytes, 128);
    return begin;
  }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
};

// Octets of a layer's weights of one pass: [chunks of x and of h][cell_groups][lanes].
ACCUMEXT_HOST_DEVICE inline int64_t octets_of_pass(const PersistentPlan& plan, int64_t depth,
                                                   int64_t units) {
  return (chunks_of(depth) + chunks_of(units)) * plan.cell_groups * 32;
}

// B rounded up to 16, 32 or 64.
inline int width_of(int64_t batch) {
  int width = kTileRows;
  while (width < batch) width *= 2;
  return width;
}

namespace persistent {

// Sets shared_bytes and the offsets in it, for so many stages.
inline void lay_out_shared(const PersistentCall& call, PersistentPlan& plan) {
  Room room;
  int64_t octets = 0;
  for (int l = 0; l < call.layers; ++l) {
    octets += octets_of_pass(plan, l == 0 ? call.inputs : call.units, call.units);
  }
  plan.cells = room.take(plan.resident ? octets * plan.passes * 16 : 0);
  const int64_t hidden = plan.operand_size * 2;
  const int64_t products = 2 * kPersistentWarps * kTileRows * plan.part_stride() * 4;
  const int64_t statistics = kPersistentWarps * plan.width * 12;
  plan.hidden = room.take(std::max({hidden, products, statistics}));
  plan.stream = room.take(kPersistentWarps * plan.stages * plan.task_rows * kChunk * 2);
  plan.biases = room.take(call.layers * plan.passes * 2 * plan.cell_groups * kRowGroup * 4);
  plan.rows = room.take(plan.width * sizeof(PersistentRow));
  plan.meetings = room.take(8);
  plan.shared_bytes = room.size();
}

inline void lay_out_scratch(const PersistentCall& call, PersistentPlan& plan) {
  Room room;
  plan.arrived = room.take(8);
  plan.keys = room.take(2 * plan.width * 8);
  plan.zeroed = room.size();
  plan.sampled = room.take(plan.width * 4);
  const int64_t copy = plan.operand_size * 2;
  plan.operands = room.take(call.layers * 2 * copy);
  plan.dropped = room.take(call.dropout_mask == nullptr ? 0 : (call.layers - 1) * copy);
  plan.shares = room.take(2 * plan.blocks * plan.width * sizeof(PersistentShare));
  plan.logits = room.take(pad_to(call.vocabulary, plan.task_rows) * plan.width * 4);
  plan.scratch_bytes = room.size();
}

// Tells whether the elements of a row are contiguous.
template <typename M>  // Matrix or AnyMatrix
bool dense_rows(const M& matrix, int64_t columns) {
  return matrix.column_stride == 1 || columns <= 1;
}

// Tells whether the kernel supports a window, on any device.
inline bool takes(const PersistentCall& call) {
  if (call.batch < 1 || call.batch > kMaxPersistentBatch || call.layers > kMaxLayers) return false;
  if (call.operand != Dtype::kHalf && call.operand != Dtype::kBFloat16) return false;
  if (call.vocabulary < 1 || call.vocabulary > (1 << 30) || call.units < 1) return false;
  if (call.exps.data != nullptr && call.exps.dtype == Dtype::kDouble) return false;
  bool dense = dense_rows(call.table, call.inputs) && dense_rows(call.head, call.units);
  for (const PersistentLayer* layer = call.layer; layer < call.layer + call.layers; ++layer) {
    const int64_t inputs = layer == call.layer ? call.inputs : call.units;
    dense = dense && dense_rows(layer->weight_ih, inputs);
    dense = dense && dense_rows(layer->weight_hh, call.units);
  }
  return dense;
}

}  // namespace persistent

// The plan of a window; its blocks are 0 if the kernel cannot run it.
inline PersistentPlan persistent_plan(const PersistentCall& call, const DeviceLimits& device) {
  PersistentPlan plan{};
  if (device.capability < 80 || device.blocks < 1 || !persistent::takes(call)) return plan;

  plan.width = width_of(call.batch);
  // With 64 rows a warp would wait for shared memory, so it uses its hidden states twice as often.
  plan.task_rows = (plan.width == 64 ? 4 : 2) * kRowGroup;
  const int gates = gate_count(call.kind);
  const int64_t units = (call.units + device.blocks - 1) / device.blocks;
  const int most = kCellRows / gates;
  plan.passes = static_cast<int>((units + most - 1) / most);
  plan.units_per_pass = static_cast<int>((units + plan.passes - 1) / plan.passes);
  plan.cell_groups = (plan.gates_rows(call.kind) + kRowGroup - 1) / kRowGroup;
  plan.operand_size = plan.width * chunks_of(call.units) * kChunk;
  // A weight that fits into half of the cache stays there. A larger one gets less of the cache,
  // because the kept part displaces other data; on an H100 three tenths of it were the best
  // share.
  const double share = static_cast<double>(device.l2_bytes) / (2.0 * call.vocabulary * call.units);
  plan.kept = static_cast<float>(share >= 2.0 ? 1.0 : 0.3 * share);

  // As many stages as there is room for; if they were too few, the cells' weights do not stay.
  const auto fits = [&](bool resident, int least) {
    plan.resident = resident;
    for (plan.stages = kMaxStages; plan.stages >= least; --plan.stages) {
      persistent::lay_out_shared(call, plan);
      if (plan.shared_bytes <= device.shared_bytes) return true;
    }
    return false;
  };
  if (!fits(true, kMinStagesBesideCells) && !fits(false, kMinStages)) return plan;
  plan.blocks = device.blocks;
  persistent::lay_out_scratch(call, plan);
  return plan;
}

}  // namespace accumext::cuda
