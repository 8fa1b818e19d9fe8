// The bookkeeping of a step of beam search.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/decoder/radix_select.cuh"

namespace accumext::cuda {

// The best hypotheses that have ended, best first: all [K, B].
template <typename T>
struct KeptHypotheses {
  double* score;  // penalised; -inf: no hypothesis
  int64_t *length, *parent, *token;
  T* log_prob;
};

// A step of B rows with K active hypotheses each, and of each hypothesis its n likeliest words.
// Hypothesis k of row b is row k B + b of the head. beam_step in accumext/generation/_beam_step.py
// says what each argument is.
template <typename T>
struct BeamStep {
  int64_t rows, beams, words;  // B, K, n
  const T* logits;             // [K B, n]
  const int64_t* found;        // [K B, n]
  const T *peak, *total;       // [K B]
  const int64_t* limits;       // [B]
  const double* late;          // [B]
  int64_t step;
  double now, soon;
  int64_t eos;
  const double* scores;                    // [K, B]
  bool* active;                            // [B]
  KeptHypotheses<T> kept, next_kept;       // [K, B]
  double* next_scores;                     // [K, B]
  int64_t *parents, *tokens, *from_row;    // [K, B]
  T* log_probs;                            // [K, B]
  bool* is_new;                            // [B]
  int64_t* best_row;                       // [B]
  Word<double>*any, *candidates, *sorted;  // [B, 2 K]: workspace

  __device__ int64_t at(int64_t k, int64_t b) const { return k * rows + b; }

  // Continuation c of row b is by word c % n of hypothesis c / n.
  __device__ int64_t word_at(int64_t c, int64_t b) const {
    return at(c / words, b) * words + c % words;
  }

  __device__ T log_prob(int64_t c, int64_t b) const {
    const int64_t hypothesis = at(c / words, b);
    return logits[word_at(c, b)] - peak[hypothesis] - std::log(total[hypothesis]);
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
//   reads   logits, T, and found, int64, [K B, n]; peak and total, T, [K B]; limits, int64, late,
//           double, and active, bool, [B]; scores, double, and kept, [K, B]
//   writes  active, [B]; next_kept, next_scores, double, parents, tokens and from_row, int64, and
//           log_probs, T, [K, B]; is_new, bool, and best_row, int64, [B]
template <typename T>
__global__ void __launch_bounds__(kBlockSize, 2) beam_step_kernel(BeamStep<T> call) {
  __shared__ Selection selection;
  __shared__ uint32_t found;
  const int64_t b = blockIdx.x;
  const int64_t beams = call.beams;
  const int64_t continuations = beams * call.words;
  const int64_t count = continuations < 2 * beams ? continuations : 2 * beams;
  const bool was_active = call.active[b];
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
  // Those that do not end stay active.
  const auto going = [&](int64_t i) {
    const int64_t c = candidate(i);
    return call.is_eos(c, b) ? -INFINITY : call.score(c, b);
  };
  for_share(count, [&](int64_t i) { any[i] = word_of<double>(key_of(going(i)), i); });
  sort_words(any, sorted, count);
  for_share(beams, [&](int64_t k) {
    const int64_t i = column_of<double>(sorted[k]);
    const int64_t c = candidate(i);
    const int64_t to = call.at(k, b);
    call.next_scores[to] = going(i);
    call.parents[to] = c / call.words;
    call.from_row[to] = call.at(c / call.words, b);
    call.tokens[to] = call.found[call.word_at(c, b)];
    call.log_probs[to] = call.log_prob(c, b);
  });
  // Of the first, those that end are compared with those that are kept.
  const auto finished = [&](int64_t i) {
    const int64_t c = candidate(i);
    const double score = call.score(c, b);
    const bool over = was_active && score != -INFINITY && (ends || call.is_eos(c, b));
    return over ? score / call.now : -INFINITY;
  };
  for_share(2 * beams, [&](int64_t i) {
    const double score = i < beams ? call.kept.score[call.at(i, b)] : finished(i - beams);
    any[i] = word_of<double>(key_of(score), i);
  });
  sort_words(any, sorted, 2 * beams);
  for_share(beams, [&](int64_t k) {
    const int64_t i = column_of<double>(sorted[k]);
    const int64_t to = call.at(k, b);
    const KeptHypotheses<T>& next = call.next_kept;
    if (i < beams) {
      const int64_t from = call.at(i, b);
      next.score[to] = call.kept.score[from];
      next.length[to] = call.kept.length[from];
      next.parent[to] = call.kept.parent[from];
      next.token[to] = call.kept.token[from];
      next.log_prob[to] = call.kept.log_prob[from];
    } else {
      const int64_t c = candidate(i - beams);
      next.score[to] = finished(i - beams);
      next.length[to] = next.score[to] == -INFINITY ? 0 : call.step + 1;
      next.parent[to] = c / call.words;
      next.token[to] = call.found[call.word_at(c, b)];
      next.log_prob[to] = call.log_prob(c, b);
    }
    if (k > 0) return;
    call.is_new[b] = i >= beams && next.score[to] != -INFINITY;
    call.best_row[b] = call.at(next.parent[to], b);
  });
  __syncthreads();
  if (threadIdx.x > 0) return;
  const double best = call.next_scores[b];
  const double worst_kept = call.next_kept.score[call.at(beams - 1, b)];
  const bool beaten = worst_kept >= best / call.soon && worst_kept >= best / call.late[b];
  call.active[b] = was_active && !ends && best != -INFINITY && !beaten;
}

// Copies states of hypotheses: of those that stay active to next, and of new best ones to best.
//
//   grid    any      block   kBlockSize threads
//   reads   state, [outer, K B, inner]; from_row, int64, [K B]; is_new, bool, and best_row, int64,
//   [B] writes  next, [outer, K B, inner]; best, [outer, B, inner] in the rows that are new E: an
//   unsigned integer of the size of an element
template <typename E>
__global__ void __launch_bounds__(kBlockSize)
    select_states_kernel(const E* state, E* next, E* best, const int64_t* from_row,
                         const bool* is_new, const int64_t* best_row, int64_t outer,
                         int64_t hypotheses, int64_t rows, int64_t inner) {
  const int64_t all = hypotheses + rows;
  for (int64_t i = blockIdx.x * int64_t{kBlockSize} + threadIdx.x; i < outer * all * inner;
       i += int64_t{gridDim.x} * kBlockSize) {
    const int64_t place = i % inner;
    const int64_t row = i / inner % all;
    const int64_t o = i / inner / all;
    const auto of = [&](int64_t from) { return state[(o * hypotheses + from) * inner + place]; };
    if (row < hypotheses) {
      next[(o * hypotheses + row) * inner + place] = of(from_row[row]);
    } else if (is_new[row - hypotheses]) {
      best[(o * rows + row - hypotheses) * inner + place] = of(best_row[row - hypotheses]);
    }
  }
}

}  // namespace accumext::cuda
