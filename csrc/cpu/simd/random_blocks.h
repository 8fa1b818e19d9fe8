// Random bits of consecutive elements, many blocks of the generator at a time.
#pragma once

#include "cpu/simd/vectors.h"
#include "math/philox.h"

namespace accumext::cpu {
namespace {

constexpr int kWords = kVectorBytes / sizeof(uint64_t);  // of a register

// The low halves of words times a factor.
[[gnu::always_inline]] inline Vector<uint64_t, kWords> low_product(Vector<uint64_t, kWords> words,
                                                                   uint32_t factor) {
  using V = Vector<uint64_t, kWords>;
  [[maybe_unused]] const V factors = splat<uint64_t, kWords>(factor);
#if ACCUMEXT_VECTOR_BYTES >= 64
  return bits<V>(_mm512_mul_epu32(bits<__m512i>(words), bits<__m512i>(factors)));
#elif ACCUMEXT_VECTOR_BYTES >= 32
  return bits<V>(_mm256_mul_epu32(bits<__m256i>(words), bits<__m256i>(factors)));
#elif defined(__SSE2__)
  return bits<V>(_mm_mul_epu32(bits<__m128i>(words), bits<__m128i>(factors)));
#else
  return (words & 0xffffffffu) * factors;
#endif
}

// a[0] b[0] a[2] b[2] ... and a[1] b[1] a[3] b[3] ..., one behind the other.
[[gnu::always_inline]] inline void store_pairs(uint64_t* to, Vector<uint64_t, kWords> a,
                                               Vector<uint64_t, kWords> b) {
#if ACCUMEXT_VECTOR_BYTES >= 64
  const auto even = _mm512_unpacklo_epi64(bits<__m512i>(a), bits<__m512i>(b));
  const auto odd = _mm512_unpackhi_epi64(bits<__m512i>(a), bits<__m512i>(b));
#elif ACCUMEXT_VECTOR_BYTES >= 32
  const auto even = _mm256_unpacklo_epi64(bits<__m256i>(a), bits<__m256i>(b));
  const auto odd = _mm256_unpackhi_epi64(bits<__m256i>(a), bits<__m256i>(b));
#else
  Vector<uint64_t, kWords> even, odd;
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

// RandomBits of the kElements elements from `first` on, in order.
template <int kBits, int kElements>
class RandomBlock {
 public:
  using word_t = std::conditional_t<kBits == 16, uint16_t, uint32_t>;

  // As many blocks as it takes from the beginning of one on; from elsewhere, a register more.
  [[gnu::always_inline]] const word_t* fill(uint64_t seed, uint64_t tensor, int64_t first) {
    constexpr int kEach = 128 / kBits;
    constexpr int kBlocks = kElements / kEach;
    static_assert(kElements % (kEach * kWords) == 0);
    const int64_t block = first / kEach;
    for (int i = 0; i < kBlocks; i += kWords) fill(seed, tensor, block + i, i);
    if (first % kEach != 0) fill(seed, tensor, block + kBlocks, kBlocks);
    return reinterpret_cast<const word_t*>(words_) + first % kEach;
  }

 private:
  // Blocks from `block` on, to be the `place`th and following ones.
  [[gnu::always_inline]] void fill(uint64_t seed, uint64_t tensor, int64_t block, int place) {
    using V = Vector<uint64_t, kWords>;
    V number;  // in the order that leaves them in order where pairs are stored
    for (int i = 0; i < kWords; ++i) number[i] = i / 2 + i % 2 * (kWords / 2);
    number += splat<uint64_t, kWords>(block);
    V words[4] = {number, number >> 32, splat<uint64_t, kWords>(tensor), V{}};
    philox(words, seed, low_product);
    const V low = splat<uint64_t, kWords>(0xffffffffu);
    store_pairs(words_ + 2 * place, (words[0] & low) | words[1] << 32,
                (words[2] & low) | words[3] << 32);
  }

  static constexpr int kRoom = kElements * kBits / 64 + 2 * kWords;
  alignas(kVectorBytes) uint64_t words_[kRoom];
};

}  // namespace
}  // namespace accumext::cpu
