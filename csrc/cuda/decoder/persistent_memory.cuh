// What the parts of the persistent kernel share: the call, its plan, and where things lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/decoder/instructions.cuh"
#include "cuda/decoder/persistent_call.h"
#include "cuda/decoder/persistent_plan.h"
#include "cuda/device.cuh"

namespace accumext::cuda {

struct PersistentMemory {
  const PersistentCall& call;
  const PersistentPlan& plan;
  std::byte* scratch;
  std::byte* shared;
  int begin_word, end_word;  // of the block's share of the vocabulary

  __device__ PersistentMemory(const PersistentCall& call, const PersistentPlan& plan,
                              std::byte* scratch)
      : call(call),
        plan(plan),
        scratch(scratch),
        shared(shared_memory()),
        begin_word(first_word(blockIdx.x)),
        end_word(first_word(blockIdx.x + int64_t{1})) {}

  // --- shared: of this block alone ---

  template <typename V>
  __device__ V* in_shared(int64_t place) const {
    return reinterpret_cast<V*>(shared + place);
  }

  __device__ PersistentRow& row(int64_t b) const { return in_shared<PersistentRow>(plan.rows)[b]; }

  // --- scratch: of all blocks ---

  template <typename V>
  __device__ V* in_scratch(int64_t place) const {
    return reinterpret_cast<V*>(scratch + place);
  }

  // h of a layer before `step`, rounded: [width, operand_stride], 0 beyond B and H.
  __device__ uint16_t* operand(int layer, int64_t step) const {
    const int64_t copy = layer * 2 + step % 2;
    return in_scratch<uint16_t>(plan.operands) + copy * plan.width * plan.operand_stride;
  }

  // h of a layer after the step, with units dropped and rounded: [width, operand_stride].
  __device__ uint16_t* dropped(int layer) const {
    return in_scratch<uint16_t>(plan.dropped) + int64_t{layer} * plan.width * plan.operand_stride;
  }

  // Of each row its largest logit and the lowest word that has it, as key_of() packs them: [width].
  __device__ unsigned long long* keys(int64_t step) const {
    return in_scratch<unsigned long long>(plan.keys) + step % 2 * plan.width;
  }

  __device__ PersistentShare& share(int64_t step, int64_t block, int64_t b) const {
    const int64_t first = (step % 2 * plan.blocks + block) * plan.width;
    return in_scratch<PersistentShare>(plan.shares)[first + b];
  }

  __device__ float* logit(int64_t word, int64_t b) const {  // of [V, width]
    return in_scratch<float>(plan.logits) + word * plan.width + b;
  }

  // --- who owns what ---

  // Where a block's share of the vocabulary begins.
  __device__ int first_word(int64_t block) const {
    const int rows = kTileRows * plan.row_tiles;
    const int64_t tasks = (call.vocabulary + rows - 1) / rows;
    const int64_t word = share_begin(tasks, block, plan.blocks) * rows;
    return static_cast<int>(word < call.vocabulary ? word : call.vocabulary);
  }

  // The block that keeps account of a row of the batch.
  __device__ bool owns_row(int64_t b) const { return b % plan.blocks == blockIdx.x; }

  // Where the call keeps a row's results: of [(end - begin) B].
  __device__ int64_t result(int64_t step, int64_t b) const {
    return (step - call.begin) * call.batch + b;
  }
};

__device__ inline float element(const AnyVector& vector, int64_t i) {
  return with_type(vector.dtype, [&](auto type) {
    return load<float>(static_cast<const decltype(type)*>(vector.data)[i]);
  });
}

}  // namespace accumext::cuda
