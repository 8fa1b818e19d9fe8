// The bookkeeping of a step of beam search.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/decoder/matrix.h"
#include "cuda/decoder/radix_select.cuh"

namespace accumext::cuda {

// A step of B rows with K active hypotheses each, and of each hypothesis its n likeliest words.
// Hypothesis k of row b is row k B + b of the head. beam_step in accumext/generation/_beam_step.py
// says what each argument is.
template <typename T>
struct BeamStep {
  int64_t rows, beams, words;  // B, K, n
  const T* logits;             // [K B, n]
  const int64_t* found;        // [K B, n]
  Matrix<const T> stats;       // [K B, 2]
  const int64_t* limits;       // [B]
  int64_t step;
  double length_penalty, now, soon;  // penalties of lengths step + 1 and step + 2
  int64_t eos;
  double* scores;                                      // [K, B]
  double* kept_scores;                                 // [K, B]
  int64_t *kept_lengths, *kept_parents, *kept_tokens;  // [K, B]
  T* kept_log_probs;                                   // [K, B]
  int64_t *parents, *tokens;                           // [K, B]
  T* log_probs;                                        // [K, B]
  Word<double>*any, *candidates, *sorted;              // [B, 2 K]: workspace

  __device__ int64_t at(int64_t k, int64_t b) const { return k * rows + b; }

  // Continuation c of row b is by word c % n of hypothesis c / n.
  __device__ int64_t word_at(int64_t c, int64_t b) const {
    return at(c / words, b) * words + c % words;
  }

  __device__ T log_prob(int64_t c, int64_t b) const {
    const int64_t hypothesis = at(c / words, b);
    const T peak = *stats.at(hypothesis, 0), total = *stats.at(hypothesis, 1);
    return logits[word_at(c, b)] - peak - std::log(total);
  }

  // A hypothesis whose score is -inf stays at that.
  __device__ double score(int64_t c, int64_t b) const {
    const double before = scores[at(c / words, b)];
    return before == -INFINITY ? before : before + static_cast<double>(log_prob(c, b));
  }

  __device__ bool is_eos(int64_t c, int64_t b) const { return found[word_at(c, b)] == eos; }
};

// Sorts different words, the largest first. Every thread must call it.
__device__ inline void sort_words(const Word<double>* words, Word<double>* sorted, int64_t count) {
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += kBlockSize) {
    int64_t rank = 0;
    for (int64_t j = 0; j < count; ++j) rank += words[j] > words[i];
    sorted[rank] = words[i];
  }
  __syncthreads();
}

// Calls f(i) for the thread's share of [0, count).
template <typename F>
__device__ void for_share(int64_t count, const F& f) {
  for (int64_t i = threadIdx.x; i < count; i += kBlockSize) f(i);
}

// The best continuations of a row, its hypotheses that stay active, and those that are kept.
//
//   grid    rows      block   kBlockSize threads
//   reads   logits, T, and found, int64, [K B, n]; stats, T, [K B, 2]; limits, int64, [B]; scores,
//           double, and kept, [K, B]
//   writes  scores, kept, parents and tokens, int64, and log_probs, T, [K, B]
template <typename T>
__global__ void __launch_bounds__(kBlockSize, 2) beam_step_kernel(BeamStep<T> call) {
  __shared__ Selection selection;
  __shared__ uint32_t found;
  const int64_t b = blockIdx.x;
  const int64_t beams = call.beams;
  const int64_t continuations = beams * call.words;
  const int64_t count = continuations < 2 * beams ? continuations : 2 * beams;
  const bool ends = call.limits[b] == call.step + 1;
  Word<double>* const any = call.any + b * 2 * beams;
  Word<double>* const candidates = call.candidates + b * 2 * beams;
  Word<double>* const sorted = call.sorted + b * 2 * beams;
  const auto each = [&](const auto& f) {
    for_share(continuations, [&](int64_t c) { f(word_of<double>(key_of(call.score(c, b)), c)); });
  };
  // Twice as many as stay active: each hypothesis has one continuation that ends at most.
  if (threadIdx.x == 0) found = 0;
  const Word<double> least = least_of_largest<double, kBlockSize>(
      selection, count, each, [](Word<double>) { return uint64_t{1}; });
  each([&](Word<double> word) {
    if (word >= least) any[atomicAdd(&found, 1u)] = word;
  });
  sort_words(any, candidates, count);
  const auto candidate = [&](int64_t i) { return column_of<double>(candidates[i]); };
  // Of the first, those that end are compared with those that are kept.
  const auto finished = [&](int64_t i) {
    const int64_t c = candidate(i);
    const double score = call.score(c, b);
    const bool over = score != -INFINITY && (ends || call.is_eos(c, b));
    return over ? score / call.now : -INFINITY;
  };
  for_share(2 * beams, [&](int64_t i) {
    const double score = i < beams ? call.kept_scores[call.at(i, b)] : finished(i - beams);
    any[i] = word_of<double>(key_of(score), i);
  });
  sort_words(any, sorted, 2 * beams);
  const double worst_kept = logit_of<double>(sorted[beams - 1]);
  // From the last on: a hypothesis that is kept moves to no better place, so none is overwritten
  // before it is read.
  for (int64_t end = beams; end > 0; end -= kBlockSize) {
    const int64_t k = end - 1 - threadIdx.x;
    int64_t length = 0, parent = 0, token = 0;
    T log_prob = 0;
    if (k >= 0) {
      const int64_t i = column_of<double>(sorted[k]);
      if (i < beams) {
        const int64_t from = call.at(i, b);
        length = call.kept_lengths[from];
        parent = call.kept_parents[from];
        token = call.kept_tokens[from];
        log_prob = call.kept_log_probs[from];
      } else {
        const int64_t c = candidate(i - beams);
        length = call.step + 1;
        parent = c / call.words;
        token = call.found[call.word_at(c, b)];
        log_prob = call.log_prob(c, b);
      }
    }
    __syncthreads();
    if (k < 0) break;
    const int64_t to = call.at(k, b);
    call.kept_scores[to] = logit_of<double>(sorted[k]);
    call.kept_lengths[to] = length;
    call.kept_parents[to] = parent;
    call.kept_tokens[to] = token;
    call.kept_log_probs[to] = log_prob;
  }
  // Those that do not end stay active.
  for_share(count, [&](int64_t i) {
    const int64_t c = candidate(i);
    const double score = call.is_eos(c, b) ? -INFINITY : call.score(c, b);
    any[i] = word_of<double>(key_of(score), i);
  });
  sort_words(any, sorted, count);
  const double best = logit_of<double>(sorted[0]);
  const bool done = ends || (worst_kept >= best / call.soon &&
                             worst_kept >= best / std::pow(static_cast<double>(call.limits[b]),
                                                           call.length_penalty));
  for_share(beams, [&](int64_t k) {
    const int64_t c = candidate(column_of<double>(sorted[k]));
    const int64_t to = call.at(k, b);
    call.scores[to] = done ? -INFINITY : logit_of<double>(sorted[k]);
    call.parents[to] = c / call.words;
    call.tokens[to] = call.found[call.word_at(c, b)];
    call.log_probs[to] = call.log_prob(c, b);
  });
}

// Copies states of hypotheses: of those that stay active to next, and of new best ones to best.
//
//   grid    any      block   kBlockSize threads
//   reads   state, [outer, K B, inner]; parents, int64, [K B]; lengths and parents of the best kept
//           hypotheses, int64, [B]
//   writes  next, [outer, K B, inner]; best, [outer, B, inner], in the rows that are new
//   E       an unsigned integer of the size of an element
template <typename E>
__global__ void __launch_bounds__(kBlockSize)
    select_states_kernel(const E* state, E* next, E* best, const int64_t* parents,
                         const int64_t* best_length, const int64_t* best_parent, int64_t new_length,
                         int64_t outer, int64_t hypotheses, int64_t rows, int64_t inner) {
  const int64_t all = hypotheses + rows;
  for (int64_t i = blockIdx.x * int64_t{kBlockSize} + threadIdx.x; i < outer * all * inner;
       i += int64_t{gridDim.x} * kBlockSize) {
    const int64_t place = i % inner;
    const int64_t row = i / inner % all;
    const int64_t o = i / inner / all;
    const int64_t b = row % rows;  // also of a best one, since rows divides hypotheses
    const auto of = [&](int64_t k) {
      return state[(o * hypotheses + k * rows + b) * inner + place];
    };
    if (row < hypotheses) {
      next[(o * hypotheses + row) * inner + place] = of(parents[row]);
    } else if (best_length[b] == new_length) {
      best[(o * rows + b) * inner + place] = of(best_parent[b]);
    }
  }
}

}  // namespace accumext::cuda
