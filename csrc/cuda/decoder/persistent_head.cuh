// The output layer inside the persistent kernel: its weight is read once per step.
#pragma once

#include "cuda/decoder/persistent_memory.cuh"
#include "cuda/decoder/persistent_results.cuh"
#include "cuda/decoder/tile_mma.cuh"

namespace accumext::cuda {

// The position of a warp's stream of weights.
struct StreamPosition {
  int steps;        // whose chunks are still to be copied
  int task, chunk;  // of the next chunk to copy
  int stage;        // of the oldest chunk, which the next one replaces
};

// A pipeline that copies a warp's rows of the head's weight into shared memory: by steps, tasks and
// chunks, in this order. The first chunks of a step are on their way before the hidden states are
// known. A task is kGroups times kRowGroup rows; a warp's tasks are every kPersistentWarps-th from
// first_ to before end_. Each lane copies the elements that it multiplies itself, so that no thread
// waits for another.
template <int kGroups>
class WeightStream {
 public:
  static constexpr int kTaskRows = kGroups * kRowGroup;  // PersistentPlan::task_rows

  __device__ explicit WeightStream(const StreamPosition& position) : position_(position) {
    find_task();
  }

  // Begins to copy the first chunks of the first step.
  __device__ static StreamPosition begin() {
    WeightStream stream({0, 0, 0, 0});
    const PersistentCall& call = stream.memory_.call;
    const bool any = stream.first_ < stream.end_;
    stream.position_ = {any ? static_cast<int>(call.end - call.begin) : 0, stream.first_, 0, 0};
    stream.find_task();
    for (int stage = 0; stage < stream.stages_; ++stage) stream.copy_next();
    return stream.position_;
  }

  __device__ int first() const { return first_; }
  __device__ int end() const { return end_; }
  __device__ const StreamPosition& position() const { return position_; }

  // Reads the oldest chunk, an octet of each group's row g, and begins to copy the next one there.
  __device__ void take(Octet (&octets)[kGroups]) {
    wait();
    const Octet* const from = octets_ + position_.stage * kStage;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) octets[group] = from[group * kWarpSize];
    copy_next();
  }

 private:
  static constexpr int kStage = kGroups * kWarpSize;  // octets

  __device__ void copy_next() {
    if (position_.steps > 0) {
      Octet* const to = octets_ + position_.stage * kStage;
      if (position_.chunk < whole_chunks_) {
        const uint16_t* from = next_;
#pragma unroll
        for (int group = 0; group < kGroups; ++group, from += group_step_) {
          copy_async(to + group * kWarpSize, from, policy_);
        }
        next_ += kChunk;
      } else {
        copy_part(to);
      }
      advance();
    }
    end_group();  // an empty group counts, too
    position_.stage = position_.stage + 1 == stages_ ? 0 : position_.stage + 1;
  }

  // Copies a chunk that has rows or columns beyond the weight's, or is not aligned.
  __device__ void copy_part(Octet* to) const {
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      weight_.copy(to + group * kWarpSize, row() + group * kRowGroup,
                   position_.chunk * kChunk + lane_octet() * kOctet, policy_);
    }
  }

  __device__ void advance() {
    if (++position_.chunk < chunks_) return;
    position_.chunk = 0;
    position_.task += kPersistentWarps;
    if (position_.task >= end_) {
      position_.task = first_;
      --position_.steps;
    }
    find_task();
  }

  __device__ int64_t row() const { return int64_t{position_.task} * kTaskRows + lane_row(); }

  __device__ void find_task() {
    next_ = weight_.at(row(), position_.chunk * kChunk + lane_octet() * kOctet);
    whole_chunks_ = weight_.whole_chunks(int64_t{position_.task} * kTaskRows, kTaskRows);
  }

  // Waits for the oldest chunk, or for a later one as well: how many groups may be pending is a
  // constant of the instruction.
  __device__ void wait() const {
    if (stages_ >= 7) {
      wait_for_group<6>();
    } else if (stages_ >= 5) {
      wait_for_group<4>();
    } else if (stages_ >= 3) {
      wait_for_group<2>();
    } else {
      wait_for_group<kMinStages - 1>();
    }
  }

  const PersistentMemory& memory_ = PersistentMemory::of_block();
  const OctetRows weight_{memory_.call.head, memory_.call.vocabulary, memory_.call.units};
  const int64_t group_step_ = kRowGroup * weight_.stride();
  const int stages_ = memory_.plan.stages;
  const int chunks_ = static_cast<int>(chunks_of(memory_.call.units));
  const uint64_t policy_ = cache_policy(memory_.plan.kept);
  const int first_ = memory_.begin_word / kTaskRows + warp_index();  // tasks
  const int end_ = (memory_.end_word + kTaskRows - 1) / kTaskRows;
  Octet* const octets_ =
      memory_.in_shared<Octet>(memory_.plan.stream) + warp_index() * stages_ * kStage + lane();
  StreamPosition position_;
  const uint16_t* next_;  // the lane's octet of the next chunk, in the first group
  int whole_chunks_;      // in the next chunk's task
};

// A block's share of the vocabulary. Its warps take tasks in turn.
template <typename T, int kTiles>
class PersistentHead {
 public:
  static constexpr int kGroups = kTiles == 4 ? 4 : 2;  // kRowGroup rows each: plan.task_rows

  // Computes the logits of a step and this block's part of each row's statistics, from h after the
  // step. Uses the shared memory at `hidden`. Before it overwrites the logits of the previous step,
  // it writes their exps, while the weight is being read.
  __device__ StreamPosition predict(int64_t step, const StreamPosition& position) const {
    load_hidden(step);
    WeightStream<kGroups> stream(position);
    const int chunks = static_cast<int>(chunks_of(call_.units));
    Statistics found[kRows];
#pragma unroll
    for (Statistics& of_row : found) of_row = {-INFINITY, word_of(stream.first(), 0), 0.0f};
#pragma unroll 1
    for (int task = stream.first(); task < stream.end(); task += kPersistentWarps) {
      if (step > call_.begin) write_exps(step - 1, task);
      float bias[kWords];
      load_bias(bias, task);
      float sums[kTiles][kGroups][4] = {};
      const Octet* hidden = memory_.in_shared<Octet>(plan_.hidden) + lane();
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk, hidden += kTiles * 2 * kWarpSize) {
        Octet weight[kGroups];
        stream.take(weight);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const Octet x[] = {hidden[2 * tile * kWarpSize], hidden[(2 * tile + 1) * kWarpSize]};
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            multiply_chunk<T>(sums[tile][group], x, weight[group]);
          }
        }
      }
      keep(sums, bias, task, found);
    }
    publish(step, found);
    return stream.position();
  }

  // Writes the exps of the step whose logits are stored.
  __device__ void write_exps(int64_t step) const {
    const WeightStream<kGroups> stream({0, 0, 0, 0});
#pragma unroll 1
    for (int task = stream.first(); task < stream.end(); task += kPersistentWarps) {
      write_exps(step, task);
    }
  }

 private:
  static constexpr int kTaskRows = WeightStream<kGroups>::kTaskRows;
  static constexpr int kWidth = kTiles * kTileRows;  // PersistentPlan::width
  static constexpr int kRows = 2 * kTiles;           // rows of the batch for which a lane has sums
  static constexpr int kWords = 2 * kGroups;         // of a task

  // The n-th of a lane's words of a task.
  __device__ static int word_of(int task, int n) {
    return task * kTaskRows + n / 2 * kRowGroup + 2 * lane_octet() + n % 2;
  }

  __device__ void load_hidden(int64_t step) const {
    const auto* from = reinterpret_cast<const Octet*>(memory_.operand(call_.layers - 1, step + 1));
    Octet* const to = memory_.in_shared<Octet>(plan_.hidden);
    const int octets = static_cast<int>(plan_.operand_size / kOctet);
    const uint64_t policy = cache_policy(1.0f);
    for (int i = threadIdx.x; i < octets; i += kBlockSize) copy_async(to + i, from + i, policy);
    end_group();
    wait_for_group<0>();
    __syncthreads();
  }

  // Loads the bias of the lane's words of a task.
  __device__ void load_bias(float (&bias)[kWords], int task) const {
    with_type(call_.head_bias.dtype, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(call_.head_bias.data);
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        const int word = word_of(task, n);
        bias[n] = from == nullptr || word >= memory_.end_word ? 0.0f : load<float>(from[word]);
      }
    });
  }

  // Stores the logits of the lane's sums, and adds them to the statistics of its rows. Beyond the
  // vocabulary a logit is -inf, not the sum: zeros times an infinite state are NaN.
  __device__ void keep(const float (&sums)[kTiles][kGroups][4], const float (&bias)[kWords],
                       int task, Statistics (&found)[kRows]) const {
    int words[kWords];
#pragma unroll
    for (int n = 0; n < kWords; ++n) words[n] = word_of(task, n);
    float* const logits = memory_.logit(words[0], lane_row());
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float z[kWords];
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        const float logit = sums[row / 2][n / 2][row % 2 * 2 + n % 2] + bias[n];
        z[n] = words[n] < memory_.end_word ? logit : -INFINITY;
        logits[(words[n] - words[0]) * kWidth + row * kRowGroup] = z[n];
      }
      add(found[row], z, words);
    }
  }

  // Writes exp(z - peak) of the lane's logits of a task, 0 at the targets. The lane wrote them, in
  // keep(). Several rows are read before the first is used, to hide the latency of the L2 cache.
  __device__ void write_exps(int64_t step, int task) const {
    if (call_.exps.data == nullptr) return;
    constexpr int kAtOnce = kRows < 4 ? kRows : 4;
    const float* const logits = memory_.logit(word_of(task, 0), lane_row());
    with_type(call_.exps.dtype, [&](auto type) {
      using exp_t = decltype(type);
      const Matrix<exp_t> exps = call_.exps.as<exp_t>();
#pragma unroll
      for (int first = 0; first < kRows; first += kAtOnce) {
        float z[kAtOnce][kWords];
#pragma unroll
        for (int row = 0; row < kAtOnce; ++row) {
#pragma unroll
          for (int n = 0; n < kWords; ++n) {
            const int word = word_of(task, n) - word_of(task, 0);
            z[row][n] = logits[word * kWidth + (first + row) * kRowGroup];
          }
        }
#pragma unroll
        for (int row = 0; row < kAtOnce; ++row) {
          const int b = (first + row) * kRowGroup + lane_row();
          if (b >= call_.batch) break;
          const PersistentRow& of = memory_.row(b);
          exp_t* const to = exps.at(memory_.result(step, b), 0);
#pragma unroll
          for (int n = 0; n < kWords; ++n) {
            const int word = word_of(task, n);
            const float x = word == of.target ? 0.0f : std::exp(z[row][n] - of.peak);
            if (word < memory_.end_word) to[word * exps.column_stride] = rounded<exp_t>(x);
          }
        }
      }
    });
  }

  // Publishes the block's statistics of every row, from those of its lanes and warps, in a fixed
  // order.
  __device__ void publish(int64_t step, Statistics (&found)[kRows]) const {
    Statistics* const parts = memory_.in_shared<Statistics>(plan_.hidden);  // [width, warps]
    __syncthreads();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const Statistics all = combined_across<4>(found[row]);
      const int b = row * kRowGroup + lane_row();
      if (lane_octet() == 0) parts[b * kPersistentWarps + warp_index()] = all;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kWidth * kPersistentWarps; i += kBlockSize) {
      const Statistics all = combined_across<kPersistentWarps>(parts[i]);
      const int b = i / kPersistentWarps;
      if (i % kPersistentWarps > 0 || b >= call_.batch) continue;
      memory_.share(step, blockIdx.x, b) = {all.sum, all.sum, all.peak};
      if (memory_.begin_word < memory_.end_word) {
        atomicMax(memory_.keys(step) + b, key_of(all.peak, all.at));
      }
    }
  }

  const PersistentMemory& memory_ = PersistentMemory::of_block();
  const PersistentCall& call_ = memory_.call;
  const PersistentPlan& plan_ = memory_.plan;
};

}  // namespace accumext::cuda
