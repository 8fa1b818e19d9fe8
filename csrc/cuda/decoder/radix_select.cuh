// Selection of the largest of the words that a block looks at, digit by digit, without a sort. All
// sums are of whole numbers, so results do not depend on the order of threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device.cuh"

namespace accumext::cuda {

// A logit and its column as one number, larger for what comes first: larger logits, NaN before all,
// and equal ones in the order of their columns. 0: no logit.
template <typename T>
using Word = std::conditional_t<std::is_same_v<T, double>, unsigned __int128, uint64_t>;

constexpr int kColumnBits = 32;

template <typename T>
constexpr int kWordBits = kColumnBits + 8 * static_cast<int>(sizeof(T));

// The bits of a T as a whole number.
template <typename T>
using Key = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;

template <typename T>
constexpr Key<T> kSign = Key<T>{1} << (8 * sizeof(T) - 1);

// A number that grows with the logit, and is never 0.
template <typename T>
__device__ Key<T> key_of(T logit) {
  logit += T(0);  // -0 equals 0
  Key<T> key;
  std::memcpy(&key, &logit, sizeof(T));
  key = (key & kSign<T>) != 0 ? ~key : key | kSign<T>;
  return logit != logit ? ~Key<T>{0} : key;
}

template <typename T>
__device__ Word<T> word_of(Key<T> key, int64_t column) {
  return Word<T>{key} << kColumnBits | static_cast<uint32_t>(~column);
}

template <typename T>
__device__ T logit_of(Word<T> word) {
  Key<T> key = static_cast<Key<T>>(word >> kColumnBits);
  key = (key & kSign<T>) != 0 ? key ^ kSign<T> : ~key;
  T logit;
  std::memcpy(&logit, &key, sizeof(T));
  return logit;
}

template <typename T>
__device__ int64_t column_of(Word<T> word) {
  return static_cast<uint32_t>(~static_cast<uint32_t>(word));
}

// --- sums of whole numbers -----------------------------------------------------------------------

// Where a thread's number lies in the running sum of those of all threads of a block.
struct Span {
  uint64_t before;  // the sum of the numbers of the threads before this one
  uint64_t mine;
  uint64_t whole;

  __device__ bool holds(uint64_t sum) const { return before <= sum && sum < before + mine; }
};

// Every thread must call it.
template <int kThreads>
__device__ Span span_of(uint64_t mine) {
  __shared__ uint64_t of_warp[kThreads / kWarpSize];
  uint64_t up_to = mine;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, up_to, distance);
    if (lane() >= distance) up_to += other;
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  if (lane() == kWarpSize - 1) of_warp[warp] = up_to;
  __syncthreads();
  Span span{up_to - mine, mine, 0};
  for (int i = 0; i < kThreads / kWarpSize; ++i) {
    if (i < warp) span.before += of_warp[i];
    span.whole += of_warp[i];
  }
  __syncthreads();
  return span;
}

// --- digits --------------------------------------------------------------------------------------

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

// Sums for each digit, of 64 bits. A GPU adds up 32 bits in its shared memory.
struct DigitSums {
  uint32_t low[kDigits], high[kDigits];

  __device__ void add(int digit, uint64_t amount) {
    const auto low_part = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&low[digit], low_part);
    const bool carries = before + low_part < before;
    const uint32_t high_part = static_cast<uint32_t>(amount >> 32) + carries;
    if (high_part > 0) atomicAdd(&high[digit], high_part);
  }

  __device__ uint64_t operator[](int digit) const {
    return static_cast<uint64_t>(high[digit]) << 32 | low[digit];
  }
};

// The shared memory of a selection.
struct Selection {
  DigitSums sums;
  int digit;
  uint64_t wanted, of_digit;  // still wanted of the sum of this digit
};

// The least of the fewest words, largest first, whose amounts add up to `wanted`, at least 1; or of
// all words. each(f) calls f(word) for words of this thread, amount(word) is a whole number. Reads
// the words once for each digit by which it has to choose. Every thread must call it.
template <typename T, int kThreads, typename Each, typename Amount>
__device__ Word<T> least_of_largest(Selection& shared, uint64_t wanted, const Each& each,
                                    const Amount& amount) {
  DigitSums& sums = shared.sums;
  constexpr int kPerPart = kDigits / kThreads;  // digits of a thread, the largest first
  Word<T> least = 0;                            // its digits so far
  int known = kWordBits<T>;                     // bits below these digits
  while (true) {
    const int shift = known > kDigitBits ? known - kDigitBits : 0;
    for (int digit = threadIdx.x; digit < kDigits; digit += kThreads) {
      sums.low[digit] = sums.high[digit] = 0;
    }
    __syncthreads();
    each([&](Word<T> word) {
      const bool in_question = known == kWordBits<T> || word >> known == least >> known;
      if (in_question) sums.add(static_cast<int>(word >> shift) & (kDigits - 1), amount(word));
    });
    __syncthreads();
    const int first = kDigits - 1 - static_cast<int>(threadIdx.x) * kPerPart;
    uint64_t mine = 0;
    for (int i = 0; i < kPerPart; ++i) mine += sums[first - i];
    const Span span = span_of<kThreads>(mine);
    if (wanted >= span.whole) return known == kWordBits<T> ? Word<T>{1} : least;
    if (span.holds(wanted - 1)) {
      uint64_t before = span.before;
      int digit = first;
      while (wanted > before + sums[digit]) before += sums[digit--];
      shared.digit = digit;
      shared.wanted = wanted - before;
      shared.of_digit = sums[digit];
    }
    __syncthreads();
    least |= static_cast<Word<T>>(shared.digit) << shift;
    wanted = shared.wanted;
    const bool wants_all = wanted + amount(least) > shared.of_digit;  // that have these digits
    if (wants_all || shift == 0) return least;
    known = shift;
  }
}

}  // namespace accumext::cuda
