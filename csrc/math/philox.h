// Philox4x32-7, a generator without state: 128 random bits as a function of a counter and a key.
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011. Seven rounds
// are the fewest with which it passes all of BigCrush. With the usual ten, a CPU would be bound by
// this computation instead of by memory.
#pragma once

#include <cstdint>

#include "math/host_device.h"

namespace accumext {

constexpr int kPhiloxRounds = 7;
// Random bits of an element. Element e of a tensor has the half word e % 8 of block e / 8 in each
// stream: the high half of its 32 bits is from stream 0, the low half from stream 1.
constexpr int kHalfBits = 16;
constexpr int kElementsPerBlock = 128 / kHalfBits;

// One of the two words of the key of a round.
ACCUMEXT_HOST_DEVICE inline uint32_t philox_key(uint64_t seed, int round, int word) {
  return word == 0 ? static_cast<uint32_t>(seed) + round * 0x9E3779B9u
                   : static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
}

// Turns counters into random bits, kCount of them side by side, since each step waits for the one
// before. A Word is a uint64_t, or on the CPU a vector of them. Only the low 32 bits of each count;
// the high ones are arbitrary. key(round, word) is philox_key as a Word; product(word, factor) is
// the 64-bit product of the low 32 bits of a word and a factor of 32 bits.
template <int kCount, typename Word, typename Key, typename Product>
ACCUMEXT_HOST_DEVICE inline void philox(Word (&counters)[kCount][4], const Key& key,
                                        const Product& product) {
#ifdef __CUDACC__
#pragma unroll 4  // unrolled fully, it would keep keys in registers from one block to the next
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (Word(&counter)[4] : counters) {
      const Word a = product(counter[0], 0xD2511F53u);
      const Word c = product(counter[2], 0xCD9E8D57u);
      counter[0] = (c >> 32) ^ counter[1] ^ key(round, 0);
      counter[1] = c;
      counter[2] = (a >> 32) ^ counter[3] ^ key(round, 1);
      counter[3] = a;
    }
  }
}

// The half words from one stream for elements [first, first + kCount) of the tensor with this
// number in the list.
template <int kCount>
ACCUMEXT_HOST_DEVICE inline void random_halves(uint64_t seed, uint64_t tensor, uint64_t stream,
                                               int64_t first, uint32_t (&halves)[kCount]) {
  static_assert(kCount <= kElementsPerBlock);
  const int place = static_cast<int>(first % kElementsPerBlock);
  // Takes a block's half words, of elements [begin, begin + kElementsPerBlock) from `first`.
  const auto take = [&](int64_t block, int begin) {
    uint64_t words[1][4] = {
        {static_cast<uint64_t>(block), static_cast<uint64_t>(block) >> 32, tensor, stream}};
    philox(
        words, [&](int round, int word) { return philox_key(seed, round, word); },
        [](uint64_t word, uint32_t factor) {
          return uint64_t{static_cast<uint32_t>(word)} * factor;
        });
    for (int n = 0; n < kCount; ++n) {
      const int at = n - begin;
      // Not words[0][at / 2]: a GPU cannot index registers.
      const uint64_t lower = at < 2 ? words[0][0] : words[0][1];
      const uint64_t upper = at < 6 ? words[0][2] : words[0][3];
      const uint32_t word = static_cast<uint32_t>(at < 4 ? lower : upper);
      if (at >= 0 && at < kElementsPerBlock) halves[n] = word >> (at & 1) * kHalfBits & 0xffff;
    }
  };
  if (kCount == kElementsPerBlock && place == 0) {  // places in the block are constants
    return take(first / kElementsPerBlock, 0);
  }
  take(first / kElementsPerBlock, -place);
  if (place + kCount > kElementsPerBlock) {
    take(first / kElementsPerBlock + 1, kElementsPerBlock - place);
  }
}

}  // namespace accumext
