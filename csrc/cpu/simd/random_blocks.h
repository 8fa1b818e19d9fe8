// Random bits of consecutive elements, many blocks of the generator at a time.
#pragma once

#include "cpu/simd/vectors.h"
#include "math/philox.h"

namespace accumext::cpu {
namespace {

constexpr int kWords = kVectorBytes / sizeof(uint64_t);  // of a register
using Words = Vector<uint64_t, kWords>;

// The low halves of words times a factor.
[[gnu::always_inline]] inline Words low_product(Words words, uint32_t factor) {
  const Words factors = splat<uint64_t, kWords>(factor);
#if ACCUMEXT_VECTOR_BYTES >= 64
  return bits<Words>(_mm512_mul_epu32(bits<__m512i>(words), bits<__m512i>(factors)));
#elif ACCUMEXT_VECTOR_BYTES >= 32
  return bits<Words>(_mm256_mul_epu32(bits<__m256i>(words), bits<__m256i>(factors)));
#elif defined(__SSE2__)
  return bits<Words>(_mm_mul_epu32(bits<__m128i>(words), bits<__m128i>(factors)));
#else
  return (words & 0xffffffffu) * factors;
#endif
}

// a[0] b[0] a[2] b[2] ..., and behind them a[1] b[1] a[3] b[3] ...
[[gnu::always_inline]] inline void store_pairs(uint64_t* to, Words a, Words b) {
#if ACCUMEXT_VECTOR_BYTES >= 64
  const auto even = _mm512_unpacklo_epi64(bits<__m512i>(a), bits<__m512i>(b));
  const auto odd = _mm512_unpackhi_epi64(bits<__m512i>(a), bits<__m512i>(b));
#elif ACCUMEXT_VECTOR_BYTES >= 32
  const auto even = _mm256_unpacklo_epi64(bits<__m256i>(a), bits<__m256i>(b));
  const auto odd = _mm256_unpackhi_epi64(bits<__m256i>(a), bits<__m256i>(b));
#else
  Words even, odd;
  for (int i = 0; i < kWords; i += 2) {
    even[i] = a[i];
    even[i + 1] = b[i];
    odd[i] = a[i + 1];
    odd[i + 1] = b[i + 1];
  }
#endif
  std::memcpy(to, &even, sizeof(even));
  std::memcpy(to + kWords, &odd, sizeof(odd));
}

// The keys of all rounds, in every element of a register.
struct PhiloxKeys {
  Words words[kPhiloxRounds][2];

  explicit PhiloxKeys(uint64_t seed) {
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int word = 0; word < 2; ++word) {
        words[round][word] = splat<uint64_t, kWords>(philox_key(seed, round, word));
      }
    }
  }

  [[gnu::always_inline]] Words operator()(int round, int word) const { return words[round][word]; }
};

// random_halves of the kElements elements of a tensor from `first` on, in order.
template <int kElements>
class RandomBlock {
 public:
  [[gnu::always_inline]] const uint16_t* fill(const PhiloxKeys& keys, uint64_t tensor,
                                              uint64_t stream, int64_t first) {
    constexpr int kBlocks = kElements / kElementsPerBlock;
    static_assert(kBlocks % (kAtOnce * kWords) == 0);
    const int64_t block = first / kElementsPerBlock;
    for (int i = 0; i < kBlocks; i += kAtOnce * kWords) {
      fill_some<kAtOnce>(keys, tensor, stream, block + i, words_ + 2 * i);
    }
    const int64_t skipped = first % kElementsPerBlock;
    if (skipped != 0) fill_some<1>(keys, tensor, stream, block + kBlocks, words_ + 2 * kBlocks);
    return reinterpret_cast<const uint16_t*>(words_) + skipped;
  }

 private:
  static constexpr int kAtOnce = 2;  // registers

  template <int kCount>
  [[gnu::always_inline]] static void fill_some(const PhiloxKeys& keys, uint64_t tensor,
                                               uint64_t stream, int64_t block, uint64_t* to) {
    Words place;  // permuted, so that stored pairs are in order
    for (int i = 0; i < kWords; ++i) place[i] = i / 2 + i % 2 * (kWords / 2);
    Words counters[kCount][4];
    for (int k = 0; k < kCount; ++k) {
      const Words number = place + splat<uint64_t, kWords>(block + k * kWords);
      counters[k][0] = number;
      counters[k][1] = number >> 32;
      counters[k][2] = splat<uint64_t, kWords>(tensor);
      counters[k][3] = splat<uint64_t, kWords>(stream);
    }
    philox(counters, keys, low_product);
    const Words low = splat<uint64_t, kWords>(0xffffffffu);
    for (int k = 0; k < kCount; ++k) {
      store_pairs(to + 2 * k * kWords, (counters[k][0] & low) | counters[k][1] << 32,
                  (counters[k][2] & low) | counters[k][3] << 32);
    }
  }

  alignas(kVectorBytes) uint64_t words_[kElements * kHalfBits / 64 + 2 * kWords];
};

}  // namespace
}  // namespace accumext::cpu
