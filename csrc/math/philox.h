// Philox4x32-10, a generator without state: 128 random bits as a function of a counter and a key.
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
#pragma once

#include <cstdint>

#include "math/host_device.h"

namespace accumext {

// counter becomes the random bits. A Word is a uint64_t, or on the CPU a vector of them; of each
// only the low 32 bits count, and what else is left in it is arbitrary. product(word, factor): the
// low 32 bits of a word times 32 bits, in 64.
template <typename Word, typename Product>
ACCUMEXT_HOST_DEVICE inline void philox(Word (&counter)[4], uint64_t key, const Product& product) {
  uint64_t low = key, high = key >> 32;
  for (int round = 0; round < 10; ++round) {
    const Word a = product(counter[0], 0xD2511F53u);
    const Word c = product(counter[2], 0xCD9E8D57u);
    counter[0] = (c >> 32) ^ counter[1] ^ low;
    counter[1] = c;
    counter[2] = (a >> 32) ^ counter[3] ^ high;
    counter[3] = a;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

// The bits of a block for some elements of the tensor of this number in its list. kBits, 16 or 32,
// go to an element; element e takes those number e % (128 / kBits) of block e / (128 / kBits).
class RandomBits {
 public:
  ACCUMEXT_HOST_DEVICE RandomBits(uint64_t seed, uint64_t tensor) : seed_(seed), tensor_(tensor) {}

  // Computed where the element before was of another block.
  template <int kBits>
  ACCUMEXT_HOST_DEVICE uint32_t of(int64_t element) {
    constexpr int kEach = 128 / kBits;
    const int64_t block = element / kEach;
    if (block != block_) {
      block_ = block;
      uint64_t words[4] = {static_cast<uint64_t>(block), static_cast<uint64_t>(block) >> 32,
                           tensor_, 0};
      philox(words, seed_, [](uint64_t word, uint32_t factor) {
        return uint64_t{static_cast<uint32_t>(word)} * factor;
      });
      for (int i = 0; i < 4; ++i) words_[i] = static_cast<uint32_t>(words[i]);
    }
    const int bit = static_cast<int>(element % kEach) * kBits;
    // Not words_[bit / 32]: a GPU cannot index registers.
    const uint32_t upper = bit < 96 ? words_[2] : words_[3];
    const uint32_t lower = bit < 32 ? words_[0] : words_[1];
    return (bit < 64 ? lower : upper) >> bit % 32 & (0xffffffffu >> (32 - kBits));
  }

 private:
  uint64_t seed_;
  uint64_t tensor_;
  int64_t block_ = -1;
  uint32_t words_[4] = {};
};

}  // namespace accumext
