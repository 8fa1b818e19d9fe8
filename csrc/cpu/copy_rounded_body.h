// The body of copy_rounded_, for the instruction set of the kernels_*.cpp that includes this.
#pragma once

#include "cpu/blocks.h"
#include "cpu/kernels.h"
#include "cpu/simd/random_blocks.h"
#include "cpu/simd/types.h"
#include "cpu/simd/vectors.h"
#include "math/accumulate.h"
#include "math/copy_rounded.h"

namespace accumext::cpu {
namespace {

template <typename scalar_t>
constexpr Format kFormat = is_half<scalar_t>                 ? kHalfFormat
                           : is_bfloat16<scalar_t>           ? kBFloat16Format
                           : std::is_same_v<scalar_t, float> ? kFloatFormat
                                                             : kDoubleFormat;
template <typename target_t, typename source_t>
using Narrow = Narrowing<kFormat<source_t>, kFormat<target_t>>;

constexpr int kRoundedBlock = 256;  // elements: random bits are ready before they are needed

// Vectors are written past the caches, if requested and if the target is aligned to them.
template <typename T>
bool is_streamed(const Rounding& how, const T* target) {
  return how.streamed && reinterpret_cast<uintptr_t>(target) % kVectorBytes == 0;
}

template <typename T, typename V>
[[gnu::always_inline]] inline void put(T* to, const V& x, bool streamed) {
  if (streamed) {
    stream(to, x);
  } else {
    std::memcpy(to, &x, sizeof(x));
  }
}

// Rounds to nearest; if the dtypes are the same, copies the bits.
//
//   reads   source, source_t, [end - begin]
//   writes  target, target_t, [end - begin]
template <typename target_t, typename source_t>
void copy_nearest(const Pair& pair, const Chunk& chunk, const Rounding& how) {
  using acc_t = acc_type<target_t, source_t>;
  constexpr int kSize = kVectorBytes / sizeof(acc_t);
  const auto targets = static_cast<target_t*>(pair.main_grad);
  const bool streamed = pair.layout.empty() && is_streamed(how, targets);
  const auto body = [&](auto count, target_t* target,
                        const source_t* source) __attribute__((always_inline)) {
    constexpr bool kWhole = !std::is_same_v<decltype(count), int>;
    prefetch<kRoundedBlock, 512>(source);
    for (int i = 0; i < kRoundedBlock; i += kSize) {
      if constexpr (std::is_same_v<target_t, source_t>) {
        using Bits = Vector<uint8_t, kSize * sizeof(source_t)>;
        put(target + i, raw<Bits>(source + i), kWhole && streamed);
      } else {
        put(target + i, rounded<target_t, kSize, acc_t>(load<acc_t, kSize>(source + i)),
            kWhole && streamed);
      }
    }
  };
  Walker<2> walker(pair.layout, chunk);
  for_each_block<kRoundedBlock>(walker, chunk.end - chunk.begin, body, targets,
                                static_cast<const source_t*>(pair.grad));
  if (streamed) finish_streaming();
}

// Rounds one element; inf, NaN and what exceeds the target's largest finite number to nearest.
template <typename target_t, typename source_t>
[[gnu::always_inline]] inline target_t stochastically_rounded(source_t x, uint32_t random) {
  using From = Narrow<target_t, source_t>;
  using U = std::conditional_t<sizeof(source_t) == 8, uint64_t, uint32_t>;
  using T = std::conditional_t<sizeof(target_t) == 4, uint32_t, uint16_t>;
  constexpr int kSign = 8 * sizeof(source_t) - 1;
  const U source = bits<U>(x);
  const U magnitude = source & ~(U{1} << kSign);
  if (magnitude > From::kLargest) return static_cast<target_t>(static_cast<float>(x));
  const U sign = source >> kSign << (8 * sizeof(target_t) - 1);
  return bits<target_t>(static_cast<T>(sign | From::of_any(magnitude, U{random})));
}

// Tells whether any element of a comparison's vector is set.
template <typename V>
[[gnu::always_inline]] inline bool any(const V& x) {
  uint64_t words[sizeof(V) / sizeof(uint64_t)], all = 0;
  std::memcpy(words, &x, sizeof(words));
  for (const uint64_t word : words) all |= word;
  return all != 0;
}

// Rounds a block of float elements that are normal in the target. Returns false if some are not;
// then `target` has to be written again.
template <typename target_t>
[[gnu::always_inline]] inline bool round_normal(target_t* target, const float* source,
                                                const uint16_t* high, bool streamed) {
  using From = Narrow<target_t, float>;
  constexpr int kSize = kVectorBytes / sizeof(float);
  using V = Vector<uint32_t, kSize>;
  V farthest{};  // the largest distance from kLeastNormal
  for (int i = 0; i < kRoundedBlock; i += kSize) {
    const V x = raw<V>(source + i);
    const V magnitude = x & 0x7fffffffu;
    const V distance = magnitude - uint32_t{From::kLeastNormal};
    farthest = farthest < distance ? distance : farthest;
    const V rounded = From::of_normal(magnitude, bits<V>(load_uint16<kSize>(high + i)));
    put(target + i, converted<uint16_t, kSize, uint32_t>(rounded | (x & 0x80000000u) >> 16),
        streamed);
  }
  return !any(farthest > splat<uint32_t, kSize>(From::kLargest - From::kLeastNormal));
}

// Rounds a block of elements of any kind.
template <typename target_t, typename source_t>
[[gnu::always_inline]] inline void round_any(target_t* target, const source_t* source,
                                             const uint16_t* high, const uint16_t* low) {
  for (int i = 0; i < kRoundedBlock; ++i) {
    const uint32_t random = uint32_t{high[i]} << kHalfBits | low[i];
    target[i] = stochastically_rounded<target_t>(source[i], random);
  }
}

inline bool is_consecutive(const int64_t* numbers, int count) {
  bool result = true;
  for (int i = 1; i < count; ++i) result = result && numbers[i] == numbers[0] + i;
  return result;
}

//   reads   source, source_t, [end - begin]
//   writes  target, target_t, [end - begin]
template <typename target_t, typename source_t>
void copy_stochastic(const Pair& pair, const Layout<3>& layout, const Chunk& chunk,
                     const Rounding& how) {
  const uint64_t seed = *how.seed, tensor = chunk.tensor;
  const PhiloxKeys keys(seed);
  const auto targets = static_cast<target_t*>(pair.main_grad);
  const bool streamed = layout.empty() && is_streamed(how, targets);
  const auto round = [&](target_t* target, const source_t* source, int64_t first, bool past_caches)
                         __attribute__((always_inline)) {
                           RandomBlock<kRoundedBlock> high;
                           const uint16_t* const random = high.fill(keys, tensor, 0, first);
                           if constexpr (std::is_same_v<source_t, float>) {
                             if (round_normal(target, source, random, past_caches)) return;
                           }
                           RandomBlock<kRoundedBlock> low;
                           round_any(target, source, random, low.fill(keys, tensor, 1, first));
                         };
  const auto body = [&](auto count, target_t* target, const source_t* source,
                        auto number) __attribute__((always_inline)) {
    if constexpr (!std::is_same_v<decltype(count), int>) {
      prefetch<kRoundedBlock, 512>(source);
      round(target, source, number.first, streamed);
    } else if (is_consecutive(number, count)) {
      round(target, source, number[0], false);
    } else {
      for (int i = 0; i < count; ++i) {
        uint32_t high[1], low[1];
        random_halves(seed, tensor, 0, number[i], high);
        random_halves(seed, tensor, 1, number[i], low);
        target[i] = stochastically_rounded<target_t>(source[i], high[0] << kHalfBits | low[0]);
      }
    }
  };
  Walker<3> walker(layout, chunk);
  for_each_block<kRoundedBlock>(walker, chunk.end - chunk.begin, body, targets,
                                static_cast<const source_t*>(pair.grad), Numbers{});
  if (streamed) finish_streaming();
}

void copy_rounded(const Pair& pair, const Layout<3>& layout, const Chunk& chunk,
                  const Rounding& how) {
  with_type(pair.main_dtype, [&](auto target_type) {
    with_type(pair.grad_dtype, [&](auto source_type) {
      using target_t = decltype(target_type);
      using source_t = decltype(source_type);
      if constexpr (sizeof(target_t) < sizeof(source_t)) {
        if (how.seed != nullptr) {
          copy_stochastic<target_t, source_t>(pair, layout, chunk, how);
          return;
        }
      }
      copy_nearest<target_t, source_t>(pair, chunk, how);
    });
  });
}

}  // namespace
}  // namespace accumext::cpu
