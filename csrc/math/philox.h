// Philox4x32-10, a generator without state: 128 random bits as a function of a counter and a key.
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
#pragma once

#include <cstdint>

#include "math/host_device.h"

namespace accumext {

constexpr int kPhiloxRounds = 10;
// Random bits of an element. Element e of a tensor has those number e % 8 of 8 in block e / 8 of a
// stream: the high half of its 32 bits in stream 0, the low half in stream 1.
constexpr int kHalfBits = 16;
constexpr int kElementsPerBlock = 128 / kHalfBits;

// The key of each round, two words of it.
template <typename Word>
struct PhiloxKeys {
  Word words[kPhiloxRounds][2];

  ACCUMEXT_HOST_DEVICE explicit PhiloxKeys(uint64_t seed) {
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      words[round][0] = Word{} + uint64_t{low};
      words[round][1] = Word{} + uint64_t{high};
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
  }
};

// Counters become random bits, kCount of them side by side, since each step waits for the one
// before. A Word is a uint64_t, or on the CPU a vector of them; of each only the low 32 bits count,
// and what else is left in it is arbitrary. product(word, factor): the low 32 bits of a word times
// 32 bits, in 64.
template <int kCount, typename Word, typename Product>
ACCUMEXT_HOST_DEVICE inline void philox(Word (&counters)[kCount][4], const PhiloxKeys<Word>& keys,
                                        const Product& product) {
  for (const auto& key : keys.words) {
    for (Word(&counter)[4] : counters) {
      const Word a = product(counter[0], 0xD2511F53u);
      const Word c = product(counter[2], 0xCD9E8D57u);
      counter[0] = (c >> 32) ^ counter[1] ^ key[0];
      counter[1] = c;
      counter[2] = (a >> 32) ^ counter[3] ^ key[1];
      counter[3] = a;
    }
  }
}

// The bits of single elements of a tensor, which has this number in its list.
class RandomBits {
 public:
  ACCUMEXT_HOST_DEVICE RandomBits(uint64_t seed, uint64_t tensor) : seed_(seed), tensor_(tensor) {}

  ACCUMEXT_HOST_DEVICE uint32_t high(int64_t element) { return half<0>(element); }

  ACCUMEXT_HOST_DEVICE uint32_t both(int64_t element) {
    return half<0>(element) << kHalfBits | half<1>(element);
  }

 private:
  // A block is computed where the element before was of another one.
  template <int kStream>
  ACCUMEXT_HOST_DEVICE uint32_t half(int64_t element) {
    const int64_t block = element / kElementsPerBlock;
    uint32_t (&words)[4] = words_[kStream];
    if (block != block_[kStream]) {
      block_[kStream] = block;
      uint64_t counter[1][4] = {
          {static_cast<uint64_t>(block), static_cast<uint64_t>(block) >> 32, tensor_, kStream}};
      philox(counter, PhiloxKeys<uint64_t>(seed_), [](uint64_t word, uint32_t factor) {
        return uint64_t{static_cast<uint32_t>(word)} * factor;
      });
      for (int i = 0; i < 4; ++i) words[i] = static_cast<uint32_t>(counter[0][i]);
    }
    const int place = static_cast<int>(element % kElementsPerBlock);
    // Not words[place / 2]: a GPU cannot index registers.
    const uint32_t first = place < 2 ? words[0] : words[1];
    const uint32_t last = place < 6 ? words[2] : words[3];
    return (place < 4 ? first : last) >> place % 2 * kHalfBits & 0xffff;
  }

  uint64_t seed_;
  uint64_t tensor_;
  int64_t block_[2] = {-1, -1};
  uint32_t words_[2][4] = {};
};

}  // namespace accumext
