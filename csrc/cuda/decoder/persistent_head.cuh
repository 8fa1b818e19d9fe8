// The output layer inside the persistent kernel: its weight, once per step, and what follows.
#pragma once

#include "cuda/decoder/persistent_memory.cuh"
#include "cuda/decoder/persistent_results.cuh"
#include "cuda/decoder/tile_mma.cuh"

namespace accumext::cuda {

// A warp's rows of the head's weight on their way into shared memory, chunk after chunk of task
// after task, step after step: the first stages of a step are on their way before the hidden states
// are known. A task is kTiles times kTileRows rows. Each lane copies what it will itself multiply,
// so that no thread waits for another.
template <int kTiles>
class WeightStream {
 public:
  __device__ WeightStream(const PersistentMemory& memory, int first_task, int tasks)
      : weight_(memory.call.head, memory.call.vocabulary, memory.call.units),
        octets_(memory.in_shared<Octet>(memory.plan.stream) +
                warp_index() * memory.plan.stages * kStage + lane()),
        stages_(memory.plan.stages),
        chunks_(static_cast<int>(chunks_of(memory.call.units))),
        policy_(cache_policy(memory.plan.kept)),
        first_task_(first_task),
        end_task_(first_task + tasks * kPersistentWarps),
        steps_(tasks > 0 ? static_cast<int>(memory.call.end - memory.call.begin) : 0),
        task_(first_task) {}

  // Before the first chunk is taken.
  __device__ void begin() {
    for (int stage = 0; stage < stages_; ++stage) copy_next();
  }

  // The oldest chunk: rows g and g + 8 of each tile.
  __device__ void take(Octet (&low)[kTiles], Octet (&high)[kTiles]) const {
    wait();
    const Octet* const octets = octets_ + stage_ * kStage;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      low[tile] = octets[2 * tile * kWarpSize];
      high[tile] = octets[(2 * tile + 1) * kWarpSize];
    }
  }

  // What has been taken is used up: another chunk takes its place.
  __device__ void refill() { copy_next(); }

 private:
  static constexpr int kStage = kTiles * 2 * kWarpSize;  // octets

  __device__ void copy_next() {
    if (steps_ > 0) {
      Octet* const octets = octets_ + stage_ * kStage;
      const int64_t row = int64_t{task_} * (kTiles * kTileRows) + lane_row();
      const int column = chunk_ * kChunk + lane_octet() * kOctet;
#pragma unroll
      for (int group = 0; group < 2 * kTiles; ++group) {
        weight_.copy(octets + group * kWarpSize, row + group * kRowGroup, column, policy_);
      }
      if (++chunk_ == chunks_) {
        chunk_ = 0;
        task_ += kPersistentWarps;
        if (task_ >= end_task_) {
          task_ = first_task_;
          --steps_;
        }
      }
    }
    end_group();  // an empty one counts, too
    stage_ = stage_ + 1 == stages_ ? 0 : stage_ + 1;
  }

  // The number of later groups is part of the instruction.
  __device__ void wait() const {
    static_assert(kMaxStages == 8);
    switch (stages_) {
      case 2:
        return wait_for_group<1>();
      case 3:
        return wait_for_group<2>();
      case 4:
        return wait_for_group<3>();
      case 5:
        return wait_for_group<4>();
      case 6:
        return wait_for_group<5>();
      case 7:
        return wait_for_group<6>();
      default:
        return wait_for_group<7>();
    }
  }

  OctetRows weight_;
  Octet* octets_;
  int stages_, chunks_;
  uint64_t policy_;
  int first_task_, end_task_;
  int steps_;      // of which chunks are to be copied
  int task_;       // of the next of them
  int chunk_ = 0;  // the same
  int stage_ = 0;  // the oldest, whose place the next copy takes
};

// A block's share of the vocabulary. Its warps take tasks in turn.
template <typename T, int kColumnTiles>
class PersistentHead {
 public:
  static constexpr int kTiles = kColumnTiles == 8 ? 2 : 1;  // PersistentPlan::row_tiles

  __device__ explicit PersistentHead(const PersistentMemory& memory)
      : memory_(memory),
        call_(memory.call),
        plan_(memory.plan),
        begin_(static_cast<int>(memory.first_word(blockIdx.x))),
        end_(static_cast<int>(memory.first_word(blockIdx.x + int64_t{1}))),
        first_task_(begin_ / kTaskRows + warp_index()),
        tasks_(tasks_of_warp()),
        stream_(memory, first_task_, tasks_) {}

  // The first part of the weight: to be called once, before all else.
  __device__ void begin() { stream_.begin(); }

  // The logits of a step and, of each row of the batch, this block's part of their statistics. The
  // states are h after the step. Takes the shared memory at `hidden`.
  __device__ void predict(int64_t step) {
    load_hidden(step);
    Statistics found[kColumnTiles][2];
    const Octet* const hidden = memory_.in_shared<Octet>(plan_.hidden) +
                                lane_row() * (plan_.hidden_stride / kOctet) + lane_octet();
    const int chunks = static_cast<int>(chunks_of(call_.units));
#pragma unroll 1
    for (int i = 0; i < tasks_; ++i) {
      float sums[kTiles][kColumnTiles][4] = {};
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        Octet low[kTiles], high[kTiles];
        stream_.take(low, high);
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          const Octet x = hidden[n * plan_.hidden_stride + chunk * (kChunk / kOctet)];
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            multiply_chunk<T>(sums[tile][n], low[tile], high[tile], x);
          }
        }
        stream_.refill();
      }
      const int64_t task = first_task_ + i * kPersistentWarps;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        keep(sums[tile], task * kTaskRows + tile * kTileRows + lane_row(), found);
      }
    }
    publish(step, found);
  }

 private:
  static constexpr int kTaskRows = kTiles * kTileRows;
  static constexpr int kWidth = kColumnTiles * kTileColumns;   // PersistentPlan::width
  static constexpr int kParts = kPersistentWarps * kRowGroup;  // of a row's statistics in a block

  __device__ int tasks_of_warp() const {
    const int tasks = (end_ - begin_ + kTaskRows - 1) / kTaskRows - warp_index();
    return tasks <= 0 ? 0 : (tasks + kPersistentWarps - 1) / kPersistentWarps;
  }

  __device__ void load_hidden(int64_t step) const {
    const uint16_t* from = memory_.operand(call_.layers - 1, step + 1);
    Octet* const to = memory_.in_shared<Octet>(plan_.hidden);
    const int octets = static_cast<int>(plan_.operand_stride / kOctet);
    const uint64_t policy = cache_policy(1.0f);
    for (int i = threadIdx.x; i < kWidth * octets; i += kBlockSize) {
      const int b = i / octets;
      const int octet = i % octets;
      copy_async(to + b * (plan_.hidden_stride / kOctet) + octet,
                 from + b * plan_.operand_stride + octet * kOctet, sizeof(Octet), policy);
    }
    end_group();
    wait_for_group<0>();
    __syncthreads();
  }

  // The sums of a tile of the lane, of rows `word` and `word` + 8 of the weight.
  __device__ void keep(const float (&sums)[kColumnTiles][4], int word,
                       Statistics (&found)[kColumnTiles][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half, word += kRowGroup) {
      if (word >= end_) continue;
      const float bias = call_.head_bias.data == nullptr ? 0.0f : element(call_.head_bias, word);
      float* const logits = memory_.logit(word, 2 * lane_octet());
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float z = sums[n][2 * half + i] + bias;
          logits[n * kTileColumns + i] = z;
          add(found[n][i], z, word);
        }
      }
    }
  }

  // The block's statistics of every row, from those of its lanes, in a fixed order.
  __device__ void publish(int64_t step, const Statistics (&found)[kColumnTiles][2]) const {
    Statistics* const parts = memory_.in_shared<Statistics>(plan_.hidden);  // [kParts, width]
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int part = warp_index() * kRowGroup + lane_row();
        parts[part * kWidth + n * kTileColumns + 2 * lane_octet() + i] = found[n][i];
      }
    }
    __syncthreads();
    constexpr int kThreads = kBlockSize / kWidth;  // that share a row
    constexpr int kEach = kParts / kThreads;
    const int b = threadIdx.x % kWidth;
    Statistics* const mine = parts + threadIdx.x / kWidth * kEach * kWidth + b;
    Statistics all = mine[0];
    for (int i = 1; i < kEach; ++i) all = combined(all, mine[i * kWidth]);
    mine[0] = all;
    __syncthreads();
    if (threadIdx.x < call_.batch) {
      for (int i = 1; i < kThreads; ++i) all = combined(all, mine[i * kEach * kWidth]);
      memory_.share(step, blockIdx.x, b) = {all.sum, all.sum, all.peak};
      if (begin_ < end_) atomicMax(memory_.keys(step) + b, key_of(all.peak, all.at));
    }
  }

  const PersistentMemory& memory_;
  const PersistentCall& call_;
  const PersistentPlan& plan_;
  int begin_, end_;  // words
  int first_task_;   // of the warp
  int tasks_;        // how many it has
  WeightStream<kTiles> stream_;
};

}  // namespace accumext::cuda
