// Products of rows of a weight with rows of the batch, a tile at a time, on tensor cores.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/decoder/instructions.cuh"
#include "cuda/decoder/matrix.h"
#include "cuda/decoder/persistent_plan.h"
#include "cuda/device.cuh"

namespace accumext::cuda {

// Lane 4 g + t of a warp has octets of row g of a weight, and the sums of rows g and g + 8 of the
// batch with rows 2 t and 2 t + 1 of the weight.
__device__ inline int lane_row() { return lane() / 4; }
__device__ inline int lane_octet() { return lane() % 4; }
__device__ inline int warp_index() { return threadIdx.x / kWarpSize; }

// sums [16, 8] += x [16, 32] w [8, 32]^T. Lane 4 g + t has elements 8 t to 8 t + 7 of row g of w,
// and the same elements of rows g and g + 8 of x in the order of operand_place(). The tensor core
// takes them for other columns, but for the same ones in both operands, so the sums are right.
template <typename T>
__device__ void multiply_chunk(float (&sums)[4], const Octet (&x)[2], const Octet& w) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t b[] = {w.words[2 * half], w.words[2 * half + 1]};
    mma_16x8x16<T>(sums, x[half].words, b);
  }
}

// The index of element `unit` of row b in rounded rows of the batch, which are in the order of the
// tensor core, an octet for each lane: [chunks][tiles of kTileRows rows][halves][lanes], with words
// of rows g and g + 8 in turn.
template <int kTiles>
__device__ int operand_place(int b, int unit) {
  const int half = (unit / kChunk * kTiles + b / kTileRows) * 2 + unit % kOctet / 4;
  const int octet = half * kWarpSize + b % kRowGroup * 4 + unit % kChunk / kOctet;
  return octet * kOctet + unit % 4 / 2 * 4 + b % kTileRows / kRowGroup * 2 + unit % 2;
}

// Reads a lane's part of a tile from such rows, of every kEvery-th chunk from `first` on; beyond
// the end the last chunk again. Other blocks have written them.
template <int kTiles, int kEvery, int kCount>
__device__ void load_operands(Octet (&x)[kCount][2], const uint16_t* operands, int tile, int first,
                              int chunks) {
  const Octet* const from = reinterpret_cast<const Octet*>(operands) + lane();
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const int mine = first + n * kEvery;
    const int chunk = mine < chunks ? mine : chunks - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = (chunk * kTiles + tile) * 2 + half;
      x[n][half] = load_shared_between_blocks(from + place * kWarpSize);
    }
  }
}

// Writes to part [kTileRows, stride] the product of a tile of the batch with `groups` groups of
// rows of a weight, over every kEvery-th chunk from `first` on. kAtOnce chunks are in flight before
// the first is multiplied.
//
//   load(x, first)          puts the tile's chunks from `first` on into Octet x[kAtOnce][2]
//   weight(chunk, group)    is the lane's octet of a group
template <typename T, int kGroups, int kEvery, int kAtOnce, typename Load, typename Weight>
__device__ void multiply_tile(float* part, int stride, int first, int chunks, int groups,
                              const Load& load, const Weight& weight) {
  float sums[kGroups][4] = {};
#pragma unroll 1
  for (; first < chunks; first += kAtOnce * kEvery) {
    Octet x[kAtOnce][2];
    load(x, first);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int chunk = first + n * kEvery;
      if (chunk >= chunks) break;
      Octet of_chunk[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group < groups) of_chunk[group] = weight(chunk, group);
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group < groups) multiply_chunk<T>(sums[group], x[n], of_chunk[group]);
      }
    }
  }
  float* const to = part + lane_row() * stride + 2 * lane_octet();
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    if (group >= groups) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector<float, 2> pair;
      for (int i = 0; i < 2; ++i) pair.set(i, sums[group][2 * half + i]);
      write(to + half * kRowGroup * stride + group * kRowGroup, pair);
    }
  }
}

template <typename T>
__device__ uint16_t operand_bits(float x) {
  const T element = rounded<T>(x);
  uint16_t bits;
  std::memcpy(&bits, &element, sizeof(bits));
  return bits;
}

// Rows of a weight in octets, with zeros beyond its rows and columns.
class OctetRows {
 public:
  __device__ OctetRows(const Matrix<const uint16_t>& weight, int64_t rows, int64_t depth)
      : weight_(weight),
        rows_(rows),
        depth_(static_cast<int>(depth)),
        aligned_(reinterpret_cast<uintptr_t>(weight.data) % sizeof(Octet) == 0 &&
                 weight.row_stride % kOctet == 0) {}

  // Elements [column, column + 8) of a row.
  __device__ Octet get(int64_t row, int column) const {
    Octet octet{};
    if (row >= rows_ || column >= depth_) return octet;
    const uint16_t* from = weight_.data + row * weight_.row_stride + column;
    const int left = depth_ - column;
    if (aligned_ && left >= kOctet) return *reinterpret_cast<const Octet*>(from);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const uint32_t element = i < left ? from[i] : 0;
      octet.words[i / 2] |= element << (16 * (i % 2));
    }
    return octet;
  }

  // Their address in a row, if it is aligned.
  __device__ const uint16_t* at(int64_t row, int column) const {
    return weight_.data + row * weight_.row_stride + column;
  }

  // From one row to the next.
  __device__ int64_t stride() const { return weight_.row_stride; }

  // The number of leading chunks of `rows` rows from `row` on that can be copied without checks.
  __device__ int whole_chunks(int64_t row, int rows) const {
    return aligned_ && row + rows <= rows_ ? depth_ / kChunk : 0;
  }

  // Begins to copy them to shared memory; they are there after the next wait for the thread's
  // groups.
  __device__ void copy(Octet* to, int64_t row, int column, uint64_t policy) const {
    if (!aligned_) {
      *to = get(row, column);
      return;
    }
    int left = row < rows_ ? depth_ - column : 0;
    left = left < 0 ? 0 : left > kOctet ? kOctet : left;
    const uint16_t* from = weight_.data + (left > 0 ? row * weight_.row_stride + column : 0);
    copy_async(to, from, 2 * left, policy);
  }

 private:
  Matrix<const uint16_t> weight_;
  int64_t rows_;
  int depth_;
  bool aligned_;
};

// Octets of rows of any dtype, rounded to T. from(n): the address of the n-th, of which `left(n)`
// elements exist; the others are 0. aligned: all octets are, and each exists wholly or not at all.
template <typename T, typename scalar_t, int kCount, typename From, typename Left>
__device__ void rounded_octets(Octet (&octets)[kCount], const From& from, const Left& left,
                               bool aligned) {
  constexpr int kWide = kVectorBytes / sizeof(scalar_t);
  Vector<scalar_t, kWide> vectors[kCount][kOctet / kWide];
  if (aligned) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int v = 0; v < kOctet / kWide; ++v) vectors[n][v] = read<kWide>(from(n) + v * kWide);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        vectors[n][i / kWide].set(i % kWide, i < left(n) ? from(n)[i] : scalar_t(0.0f));
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    octets[n] = {};
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float x = load<float>(vectors[n][i / kWide].get(i % kWide));
      octets[n].words[i / 2] |= static_cast<uint32_t>(operand_bits<T>(x)) << (16 * (i % 2));
    }
    if (left(n) <= 0) octets[n] = {};
  }
}

}  // namespace accumext::cuda
