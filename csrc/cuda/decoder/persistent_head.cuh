// The output layer inside the persistent kernel: its weight, once per step, and what follows.
#pragma once

#include "cuda/decoder/persistent_memory.cuh"
#include "cuda/decoder/persistent_results.cuh"
#include "cuda/decoder/tile_mma.cuh"

namespace accumext::cuda {

// How far a warp's stream of weights has come.
struct StreamPosition {
  int steps;        // of which chunks are to be copied
  int task, chunk;  // of the next of them
  int stage;        // of the oldest chunk that is there, whose place the next one takes
};

// A warp's rows of the head's weight on their way into shared memory, chunk after chunk of task
// after task, step after step: the first stages of a step are on their way before the hidden states
// are known. A task is kTiles times kTileRows rows; a warp's tasks are `first`, every
// kPersistentWarps-th from there, before `end`. Each lane copies what it will itself multiply, so
// that no thread waits for another.
template <int kTiles>
class WeightStream {
 public:
  static constexpr int kTaskRows = kTiles * kTileRows;

  __device__ WeightStream(const PersistentMemory& memory, const StreamPosition& position)
      : weight_(memory.call.head, memory.call.vocabulary, memory.call.units),
        octets_(memory.in_shared<Octet>(memory.plan.stream) +
                warp_index() * memory.plan.stages * kStage + lane()),
        stages_(memory.plan.stages),
        chunks_(static_cast<int>(chunks_of(memory.call.units))),
        policy_(cache_policy(memory.plan.kept)),
        first_(first_task(memory)),
        end_(end_task(memory)),
        position_(position) {}

  // The first stages of the first step.
  __device__ static StreamPosition begin(const PersistentMemory& memory) {
    const int first = first_task(memory);
    const bool any = first < end_task(memory);
    const int steps = any ? static_cast<int>(memory.call.end - memory.call.begin) : 0;
    WeightStream stream(memory, {steps, first, 0, 0});
    for (int stage = 0; stage < stream.stages_; ++stage) stream.copy_next();
    return stream.position_;
  }

  __device__ int first() const { return first_; }
  __device__ int end() const { return end_; }
  __device__ const StreamPosition& position() const { return position_; }

  // The oldest chunk: rows g and g + 8 of each tile.
  __device__ void take(Octet (&low)[kTiles], Octet (&high)[kTiles]) const {
    wait();
    const Octet* const octets = octets_ + position_.stage * kStage;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      low[tile] = octets[2 * tile * kWarpSize];
      high[tile] = octets[(2 * tile + 1) * kWarpSize];
    }
  }

  // What has been taken is used up: the next chunk takes its place.
  __device__ void copy_next() {
    if (position_.steps > 0) {
      Octet* const octets = octets_ + position_.stage * kStage;
      const int64_t row = int64_t{position_.task} * kTaskRows + lane_row();
      const int column = position_.chunk * kChunk + lane_octet() * kOctet;
#pragma unroll
      for (int group = 0; group < 2 * kTiles; ++group) {
        weight_.copy(octets + group * kWarpSize, row + group * kRowGroup, column, policy_);
      }
      advance();
    }
    end_group();  // an empty one counts, too
    position_.stage = position_.stage + 1 == stages_ ? 0 : position_.stage + 1;
  }

 private:
  static constexpr int kStage = kTiles * 2 * kWarpSize;  // octets

  __device__ static int first_task(const PersistentMemory& memory) {
    return memory.begin_word / kTaskRows + warp_index();
  }

  __device__ static int end_task(const PersistentMemory& memory) {
    return (memory.end_word + kTaskRows - 1) / kTaskRows;
  }

  __device__ void advance() {
    if (++position_.chunk < chunks_) return;
    position_.chunk = 0;
    position_.task += kPersistentWarps;
    if (position_.task < end_) return;
    position_.task = first_;
    --position_.steps;
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
  int first_, end_;  // tasks
  StreamPosition position_;
};

// A block's share of the vocabulary. Its warps take tasks in turn.
template <typename T, int kColumnTiles>
class PersistentHead {
 public:
  static constexpr int kTiles = kColumnTiles == 8 ? 2 : 1;  // PersistentPlan::row_tiles

  __device__ explicit PersistentHead(const PersistentMemory& memory)
      : memory_(memory), call_(memory.call), plan_(memory.plan) {}

  // The logits of a step and, of each row of the batch, this block's part of their statistics. The
  // states are h after the step. Takes the shared memory at `hidden`.
  __device__ StreamPosition predict(int64_t step, const StreamPosition& position) const {
    load_hidden(step);
    WeightStream<kTiles> stream(memory_, position);
    Statistics found[2] = {of_no_logits(), of_no_logits()};
    const Octet* const hidden = memory_.in_shared<Octet>(plan_.hidden) +
                                lane_row() * (plan_.hidden_stride / kOctet) + lane_octet();
    const int chunks = static_cast<int>(chunks_of(call_.units));
#pragma unroll 1
    for (int task = stream.first(); task < stream.end(); task += kPersistentWarps) {
      float sums[kTiles][kColumnTiles][4] = {};
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        Octet low[kTiles], high[kTiles];
        stream.take(low, high);
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          const Octet x = hidden[n * plan_.hidden_stride + chunk * (kChunk / kOctet)];
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            multiply_chunk<T>(sums[tile][n], low[tile], high[tile], x);
          }
        }
        stream.copy_next();
      }
      keep(sums, task, found);
    }
    publish(step, found);
    return stream.position();
  }

 private:
  static constexpr int kTaskRows = WeightStream<kTiles>::kTaskRows;
  static constexpr int kWidth = kColumnTiles * kTileColumns;  // PersistentPlan::width
  static constexpr int kShares =
      kRowGroup / kColumnTiles;  // lanes of a warp that have equal columns
  static constexpr int kParts = kPersistentWarps * kShares;  // of a row's statistics in a block

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

  // Of the lane's sums the logits, and of its column tile what they come to.
  __device__ void keep(const float (&sums)[kTiles][kColumnTiles][4], int task,
                       Statistics (&found)[2]) const {
    Statistics of_task[kColumnTiles][2];
#pragma unroll
    for (auto& of_tile : of_task) of_tile[0] = of_tile[1] = of_no_logits();
    int word = task * kTaskRows + lane_row();
#pragma unroll
    for (int group = 0; group < 2 * kTiles; ++group, word += kRowGroup) {
      if (word >= memory_.end_word) continue;
      const float bias = call_.head_bias.data == nullptr ? 0.0f : element(call_.head_bias, word);
      float* const logits = memory_.logit(word, 2 * lane_octet());
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float z = sums[group / 2][n][group % 2 * 2 + i] + bias;
          logits[n * kTileColumns + i] = z;
          add(of_task[n][i], z, word);
        }
      }
    }
    scatter(of_task, found);
  }

  // Lanes of equal columns share out the column tiles: lane 4 g + t is left with tile
  // g % kColumnTiles, of as many rows g as have it in common.
  template <int kCount>
  __device__ static void scatter(const Statistics (&all)[kCount][2], Statistics (&found)[2]) {
    if constexpr (kCount == 1) {
      for (int i = 0; i < 2; ++i) found[i] = combined(found[i], all[0][i]);
    } else {
      constexpr int kHalf = kCount / 2;
      const bool upper = lane_row() / kHalf % 2 != 0;
      Statistics kept[kHalf][2];
#pragma unroll
      for (int n = 0; n < kHalf; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Statistics mine = chosen(upper, all[n + kHalf][i], all[n][i]);
          const Statistics given = chosen(upper, all[n][i], all[n + kHalf][i]);
          kept[n][i] = combined(mine, across(given, 4 * kHalf));
        }
      }
      scatter(kept, found);
    }
  }

  // The block's statistics of every row, from those of its lanes, in a fixed order.
  __device__ void publish(int64_t step, const Statistics (&found)[2]) const {
    Statistics* const parts = memory_.in_shared<Statistics>(plan_.hidden);  // [kParts, width]
    __syncthreads();
    const int part = warp_index() * kShares + lane_row() / kColumnTiles;
    const int first = lane_row() % kColumnTiles * kTileColumns + 2 * lane_octet();
    for (int i = 0; i < 2; ++i) parts[part * kWidth + first + i] = found[i];
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
      if (memory_.begin_word < memory_.end_word) {
        atomicMax(memory_.keys(step) + b, key_of(all.peak, all.at));
      }
    }
  }

  const PersistentMemory& memory_;
  const PersistentCall& call_;
  const PersistentPlan& plan_;
};

}  // namespace accumext::cuda
