// A window of decoder steps in one cooperative launch.
#pragma once

#include "cuda/decoder/grid_barrier.cuh"
#include "cuda/decoder/persistent_cell.cuh"
#include "cuda/decoder/persistent_head.cuh"
#include "cuda/decoder/persistent_kernel.h"

namespace accumext::cuda {

// The work of one block. Its parts are outlined, so that each one can use all registers.
template <typename T, int kTiles>
class PersistentSteps {
 public:
  __device__ void run() {
    StreamPosition position = begin_stream();
    prepare();
    barrier_.arrive();
    read_first_inputs();
    barrier_.wait();
    multiply(0, 0, Operand::kH, call_.begin);
#pragma unroll 1
    for (int64_t step = call_.begin; step < call_.end; ++step) {
      advance(step);
      clear_keys(step + 1);
      position = predict(step, position);
      if (call_.uniforms != nullptr && call_.temperature != 1.0) temper(step);
      barrier_.arrive();
      if (step + 1 < call_.end) multiply(0, 0, Operand::kH, step + 1);
      barrier_.wait();
      if (call_.uniforms != nullptr) {
        sample(step);
        barrier_.arrive();
        barrier_.wait();
      }
      if (threadIdx.x < call_.batch) feed_back(step, threadIdx.x);
      __syncthreads();
    }
    record(call_.end - 1);
    write_exps(call_.end - 1);
  }

 private:
  using Cell = PersistentCell<T, kTiles>;
  using Head = PersistentHead<T, kTiles>;

  __device__ __noinline__ static StreamPosition begin_stream() {
    return WeightStream<Head::kGroups>::begin();
  }

  __device__ __noinline__ static StreamPosition predict(int64_t step, StreamPosition position) {
    return Head().predict(step, position);
  }

  __device__ __noinline__ static void prepare() {
    const Cell cell;
    cell.round_states();
    cell.load_weights();
  }

  __device__ __noinline__ static void multiply(int layer, int pass, Operand operand, int64_t step) {
    Cell().multiply(layer, pass, operand, step);
  }

  __device__ __noinline__ static void advance_pass(int layer, int pass, int64_t step) {
    Cell().advance(layer, pass, step);
  }

  __device__ __noinline__ static void temper(int64_t step) { PersistentResults().temper(step); }

  // Draws the tokens of the rows that the block owns, for all blocks.
  __device__ __noinline__ static void sample(int64_t step) {
    const PersistentMemory& memory = PersistentMemory::of_block();
    int* const sampled = memory.in_scratch<int>(memory.plan.sampled);
    for (int64_t b = blockIdx.x; b < memory.call.batch; b += memory.plan.blocks) {
      const int token = PersistentResults().sample(step, b);
      if (threadIdx.x == 0) sampled[b] = token;
    }
  }

  __device__ __noinline__ static void record(int64_t step) { PersistentResults().record(step); }

  __device__ __noinline__ static void write_exps(int64_t step) { Head().write_exps(step); }

  // Advances all layers. The first pass of the first layer has already been multiplied with h.
  __device__ void advance(int64_t step) {
#pragma unroll 1
    for (int layer = 0; layer < call_.layers; ++layer) {
#pragma unroll 1
      for (int pass = 0; pass < memory_.plan.passes; ++pass) {
        if (layer > 0 || pass > 0) multiply(layer, pass, Operand::kH, step);
        multiply(layer, pass, Operand::kX, step);
        __syncthreads();
        advance_pass(layer, pass, step);
        __syncthreads();
      }
      barrier_.arrive();
      if (layer == 0 && step > call_.begin) record(step - 1);
      barrier_.wait();
    }
  }

  __device__ void read_first_inputs() const {
    const int b = threadIdx.x;
    if (b >= call_.batch) return;
    const int64_t at = call_.begin * call_.batch + b;
    PersistentRow& row = memory_.row(b);
    row.fed = checked(call_.inputs_fed[at]);
    row.active = call_.active == nullptr || call_.active[at];
    row.ended = false;
  }

  // Clears the keys of the step before, which no other block reads any more, for the next step.
  __device__ void clear_keys(int64_t step) const {
    if (blockIdx.x == 0 && threadIdx.x < call_.batch) memory_.keys(step)[threadIdx.x] = 0;
  }

  // Finds the token that a row has predicted, whether the row has ended, and its next input. Every
  // block does so for itself; the owner of the row writes the results.
  __device__ void feed_back(int64_t step, int b) const {
    PersistentRow& row = memory_.row(b);
    const int64_t at = step * call_.batch + b;
    const bool owns = memory_.owns_row(b);
    const Peak<float> peak = peak_of(load_shared_between_blocks(memory_.keys(step) + b));
    int64_t token = peak.at;
    if (call_.uniforms != nullptr) {
      token = load_shared_between_blocks(memory_.in_scratch<int>(memory_.plan.sampled) + b);
    }
    if (!row.active) token = call_.pad;
    row.peak = peak.value;
    row.target = call_.targets == nullptr ? token : call_.targets[at];
    if (owns) call_.tokens[at] = token;
    if (step + 1 == call_.steps) return;

    const int64_t next = at + call_.batch;
    const bool ends = call_.eos >= 0 && (!row.active || token == call_.eos);
    if (ends && !row.ended && owns) {
      for (int64_t later = step + 1; later < call_.steps; ++later) {
        call_.active[later * call_.batch + b] = false;
      }
    }
    row.ended = row.ended || ends;
    row.active = !row.ended && (call_.active == nullptr || call_.active[next]);
    const bool taught =
        call_.teacher != nullptr && (call_.teacher_mask == nullptr || call_.teacher_mask[next]);
    row.fed = checked(!row.active ? call_.pad : taught ? call_.teacher[next] : token);
    if (owns) call_.inputs_fed[next] = row.fed;
  }

  __device__ int64_t checked(int64_t token) const {
    if (token < 0 || token >= call_.table_rows) __trap();
    return token;
  }

  const PersistentMemory& memory_ = PersistentMemory::of_block();
  const PersistentCall& call_ = memory_.call;
  GridBarrier barrier_{memory_.in_scratch<unsigned long long>(memory_.plan.arrived),
                       memory_.in_shared<unsigned long long>(memory_.plan.meetings), gridDim.x};
};

// Steps [begin, end) of a recurrent decoder with its head. All blocks run at the same time, with a
// barrier per layer and per step, and one more if tokens are sampled.
//
//   grid    plan.blocks, a cooperative launch    block   kBlockSize threads, with
//           plan.shared_bytes of dynamic shared memory
//   scratch plan.scratch_bytes, of which the first plan.zeroed are 0
//   reads   per step: the head's weight, 2 V H bytes; rows of the table, [B, E], and the rounded
//           states, [B, H], by every block, which the L2 cache has after the first; the cells'
//           weights once per window if they stay in shared memory, else per step
//   writes  per step: states, [B, H]; logits to scratch, 4 V width bytes, read again a step later
//           for exps, [B, V]; tokens, inputs, rows, stats and active, [B]
template <typename T, int kTiles>
__global__ void __launch_bounds__(kBlockSize, 1)
    persistent_steps_kernel(const __grid_constant__ PersistentCall call,
                            const __grid_constant__ PersistentPlan plan, std::byte* scratch) {
  PersistentMemory::set_up(call, plan, scratch);
  PersistentSteps<T, kTiles>().run();
}

template <typename T, int kTiles>
PersistentKernel persistent_kernel() {
  return persistent_steps_kernel<T, kTiles>;
}

}  // namespace accumext::cuda
