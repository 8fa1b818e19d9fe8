// Data shared by the parts of the persistent kernel: the call, its plan, and the memory layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "cuda/decoder/instructions.cuh"
#include "cuda/decoder/persistent_call.h"
#include "cuda/decoder/persistent_plan.h"
#include "cuda/device.cuh"

namespace accumext::cuda {

// It is itself in shared memory: an outlined function would read the kernel's arguments through the
// caches, which every barrier of the blocks invalidates.
struct PersistentMemory {
  PersistentCall call;
  PersistentPlan plan;
  std::byte* scratch;
  int begin_word, end_word;  // the block's share of the vocabulary
  int begin_unit, end_unit;  // of the units of every layer

  // The memory of the block, once all threads have called set_up().
  __device__ static const PersistentMemory& of_block() { return *place(); }

  __device__ static void set_up(const PersistentCall& call, const PersistentPlan& plan,
                                std::byte* scratch) {
    if (threadIdx.x == 0) new (place()) PersistentMemory(call, plan, scratch);
    __syncthreads();
  }

  // --- shared: of this block alone ---

  template <typename V>
  __device__ V* in_shared(int64_t place) const {
    return reinterpret_cast<V*>(shared_memory() + place);
  }

  __device__ PersistentRow& row(int64_t b) const { return in_shared<PersistentRow>(plan.rows)[b]; }

  // --- scratch: of all blocks ---

  template <typename V>
  __device__ V* in_scratch(int64_t place) const {
    return reinterpret_cast<V*>(scratch + place);
  }

  // h of a layer before `step`, rounded, in the order of operand_place(); 0 beyond B and H.
  __device__ uint16_t* operand(int layer, int64_t step) const {
    return in_scratch<uint16_t>(plan.operands) + (layer * 2 + step % 2) * plan.operand_size;
  }

  // h of a layer after the step, with units dropped and rounded, in the same order.
  __device__ uint16_t* dropped(int layer) const {
    return in_scratch<uint16_t>(plan.dropped) + layer * plan.operand_size;
  }

  // The largest logit of each row and the lowest word that has it, as key_of() packs them: [width].
  __device__ unsigned long long* keys(int64_t step) const {
    return in_scratch<unsigned long long>(plan.keys) + step % 2 * plan.width;
  }

  __device__ PersistentShare& share(int64_t step, int64_t block, int64_t b) const {
    const int64_t first = (step % 2 * plan.blocks + block) * plan.width;
    return in_scratch<PersistentShare>(plan.shares)[first + b];
  }

  // An element of [V, width], or of words up to the end of the last task.
  __device__ float* logit(int64_t word, int64_t b) const {
    return in_scratch<float>(plan.logits) + word * plan.width + b;
  }

  // --- who owns what ---

  // The begin of a block's share of the vocabulary.
  __device__ int first_word(int64_t block) const {
    const int64_t tasks = (call.vocabulary + plan.task_rows - 1) / plan.task_rows;
    const int64_t word = share_begin(tasks, block, plan.blocks) * plan.task_rows;
    return static_cast<int>(word < call.vocabulary ? word : call.vocabulary);
  }

  // Tells whether this block writes the results of a row of the batch.
  __device__ bool owns_row(int64_t b) const { return b % plan.blocks == blockIdx.x; }

  // The index of a row's results, of [(end - begin) B].
  __device__ int64_t result(int64_t step, int64_t b) const {
    return (step - call.begin) * call.batch + b;
  }

 private:
  __device__ PersistentMemory(const PersistentCall& call, const PersistentPlan& plan,
                              std::byte* scratch)
      : call(call),
        plan(plan),
        scratch(scratch),
        begin_word(first_word(blockIdx.x)),
        end_word(first_word(blockIdx.x + int64_t{1})),
        begin_unit(static_cast<int>(share_begin(call.units, blockIdx.x, plan.blocks))),
        end_unit(static_cast<int>(share_begin(call.units, blockIdx.x + int64_t{1}, plan.blocks))) {}

  __device__ static PersistentMemory* place() {
    struct alignas(16) Room {
      std::byte bytes[sizeof(PersistentMemory)];
    };
    __shared__ Room room;
    return reinterpret_cast<PersistentMemory*>(room.bytes);
  }
};

__device__ inline float element(const AnyVector& vector, int64_t i) {
  return with_type(vector.dtype, [&](auto type) {
    return load<float>(static_cast<const decltype(type)*>(vector.data)[i]);
  });
}

}  // namespace accumext::cuda
