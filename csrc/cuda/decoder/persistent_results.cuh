// The results that the persistent kernel computes from a step's logits.
#pragma once

#include <climits>
#include <cmath>
#include <cstring>

#include "cuda/decoder/persistent_memory.cuh"
#include "cuda/decoder/row_tiles.cuh"
#include "cuda/decoder/softmax_stats.cuh"

namespace accumext::cuda {

// The statistics of some logits of a row of the batch.
struct Statistics {
  float peak;
  int at;
  float sum;  // of exp(z - peak)
};
static_assert(sizeof(Statistics) == 12);  // persistent_plan.h

// The statistics of two sets of logits together; of equal logits the first counts.
__device__ inline Statistics combined(const Statistics& a, const Statistics& b) {
  const Peak<float> top = combined(Peak<float>{a.peak, a.at}, Peak<float>{b.peak, b.at});
  const auto scaled = [&](const Statistics& part) {
    return part.peak == -INFINITY ? 0.0f : part.sum * std::exp(part.peak - origin(top.value));
  };
  return {top.value, top.at, scaled(a) + scaled(b)};
}

// Adds more logits, of later words in their order; without a branch, of which lanes would take both
// sides.
template <int kCount>
__device__ void add(Statistics& to, const float (&logits)[kCount], const int (&words)[kCount]) {
  const float before = to.peak;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const bool above = !(logits[n] <= to.peak) && to.peak == to.peak;  // a NaN before any number
    to.peak = above ? logits[n] : to.peak;
    to.at = above ? words[n] : to.at;
  }
  const float from = origin(to.peak);
  to.sum *= std::exp(before - from);
#pragma unroll
  for (int n = 0; n < kCount; ++n) to.sum += std::exp(logits[n] - from);
}

// Combines the statistics of kLanes neighbouring lanes. All lanes must call it.
template <int kLanes>
__device__ Statistics combined_across(Statistics all) {
  for (int distance = 1; distance < kLanes; distance *= 2) {
    all = combined(all, {__shfl_xor_sync(kAllLanes, all.peak, distance),
                         __shfl_xor_sync(kAllLanes, all.at, distance),
                         __shfl_xor_sync(kAllLanes, all.sum, distance)});
  }
  return all;
}

// Packs a logit and its word into 64 bits: the larger logit, of equal ones the lower word, makes
// the larger number; a NaN makes the largest. Never 0.
__device__ inline unsigned long long key_of(float logit, int word) {
  logit += 0.0f;  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &logit, sizeof(bits));
  constexpr uint32_t kSign = 0x80000000u;
  const uint32_t ordered = logit != logit ? ~0u : (bits & kSign) != 0 ? ~bits : bits | kSign;
  return static_cast<unsigned long long>(ordered) << 32 | (~0u - static_cast<uint32_t>(word));
}

__device__ inline Peak<float> peak_of(unsigned long long key) {
  constexpr uint32_t kSign = 0x80000000u;
  const auto ordered = static_cast<uint32_t>(key >> 32);
  const uint32_t bits = (ordered & kSign) != 0 ? ordered & ~kSign : ~ordered;
  Peak<float> peak;
  std::memcpy(&peak.value, &bits, sizeof(bits));
  peak.at = static_cast<int>(~0u - static_cast<uint32_t>(key));
  return peak;
}

// 1 / temperature, as inverse_of() in softmax_stats.cuh; 1 if tokens are not sampled.
__device__ inline float inverse_temperature(const PersistentCall& call) {
  constexpr double kMost = 0x1p126;
  if (call.uniforms == nullptr) return 1.0f;
  const double inverse = 1.0 / call.temperature;
  return static_cast<float>(inverse > kMost ? kMost : inverse < 1 / kMost ? 1 / kMost : inverse);
}

// Draws the tokens of a step that every block has predicted, and writes the numbers of the loss.
class PersistentResults {
 public:
  // Computes the sums of the block's logits that sample() reads if the temperature is not 1. Uses
  // the shared memory at `hidden`.
  __device__ void temper(int64_t step) const {
    const int b = threadIdx.x % plan_.width;
    const int turns = kBlockSize / plan_.width;
    double* const sums = memory_.in_shared<double>(plan_.hidden);
    __syncthreads();
    double sum = 0.0;
    if (b < call_.batch) {
      const float factor = inverse_temperature(call_);
      const float from = origin(memory_.share(step, blockIdx.x, b).peak);
      int word = memory_.begin_word + threadIdx.x / plan_.width;
#pragma unroll 4
      for (; word < memory_.end_word; word += turns) {
        sum += std::exp((*memory_.logit(word, b) - from) * factor);
      }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= call_.batch) return;
    for (int turn = 1; turn < turns; ++turn) sum += sums[turn * plan_.width + b];
    memory_.share(step, blockIdx.x, b).tempered = sum;
  }

  // Draws a row's token by inversion; see sampled() in softmax_stats.cuh. All threads of the block
  // must call it, after every block has predicted.
  __device__ int sample(int64_t step, int64_t b) const {
    const Place place(Tiles{1, 1, 1});
    const float factor = inverse_temperature(call_);
    const auto inverse = static_cast<double>(factor);
    const Peak<float> peak = peak_of(load_shared_between_blocks(memory_.keys(step) + b));
    const auto share = [&](int block) {
      const PersistentShare* of = &memory_.share(step, block, b);
      const double depth = static_cast<double>(load_shared_between_blocks(&of->peak)) -
                           static_cast<double>(peak.value);
      return load_shared_between_blocks(&of->tempered) * std::exp(depth * inverse);
    };
    const Prefix prefix = row_prefix(place, plan_.blocks, share);
    const double threshold = call_.uniforms[step * call_.batch + b] * prefix.whole;
    const Crossing in = first_past(place, plan_.blocks, prefix.before, threshold, share);
    const int block = in.exists() ? in.term() : 0;
    const int first = memory_.first_word(block);
    const int words = memory_.first_word(block + int64_t{1}) - first;
    const auto mass = [&](int i) {
      const float z = load_shared_between_blocks(memory_.logit(first + i, b));
      return static_cast<double>(std::exp((z - peak.value) * factor));
    };
    const Prefix within = row_prefix(place, words, mass);
    const Crossing found = first_past(place, words, within.before, threshold - in.before, mass);
    return in.exists() && found.exists() ? first + found.term() : peak.at;
  }

  // Writes the results that no later step reads, except exps, which persistent_head.cuh writes.
  __device__ void record(int64_t step) const {
    record_targets(step);
    record_statistics(step);
  }

 private:
  // Writes the logit of the target; the block that has it does so.
  __device__ void record_targets(int64_t step) const {
    for (int b = threadIdx.x; b < call_.batch; b += kBlockSize) {
      const int64_t target = memory_.row(b).target;
      float* const to = call_.stats.at(2, memory_.result(step, b));
      if (target >= memory_.begin_word && target < memory_.end_word)
        *to = *memory_.logit(target, b);
      const bool exists = target >= 0 && target < call_.vocabulary;
      if (!exists && memory_.owns_row(b)) *to = NAN;
    }
  }

  // Writes the other statistics of the rows that the block owns, a warp per row.
  __device__ void record_statistics(int64_t step) const {
    constexpr int kAtOnce = 5;  // all 132 blocks of an H100
    for (int64_t b = blockIdx.x + int64_t{warp_index()} * plan_.blocks; b < call_.batch;
         b += int64_t{kPersistentWarps} * plan_.blocks) {
      const float peak = memory_.row(b).peak;
      double sum = 0.0;
      for (int first = lane(); first < plan_.blocks; first += kAtOnce * kWarpSize) {
        float peaks[kAtOnce];
        double sums[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const int block = first + n * kWarpSize;
          const bool exists = block < plan_.blocks;
          const PersistentShare* of = &memory_.share(step, exists ? block : first, b);
          peaks[n] = load_shared_between_blocks(&of->peak);
          sums[n] = exists ? load_shared_between_blocks(&of->sum) : 0.0;
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          sum += sums[n] * std::exp(static_cast<double>(peaks[n]) - static_cast<double>(peak));
        }
      }
      for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(kAllLanes, sum, distance);
      }
      if (lane() > 0) continue;
      const int64_t result = memory_.result(step, b);
      *call_.stats.at(0, result) = peak;
      *call_.stats.at(1, result) = static_cast<float>(sum);
      call_.rows[result] = step * call_.batch + b;
    }
  }

  const PersistentMemory& memory_ = PersistentMemory::of_block();
  const PersistentCall& call_ = memory_.call;
  const PersistentPlan& plan_ = memory_.plan;
};

}  // namespace accumext::cuda
