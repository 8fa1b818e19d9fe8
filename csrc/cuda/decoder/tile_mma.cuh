// Products of rows of a weight with rows of the batch, a tile at a time, on tensor cores.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/decoder/instructions.cuh"
#include "cuda/decoder/matrix.h"
#include "cuda/decoder/persistent_plan.h"
#include "cuda/device.cuh"

namespace accumext::cuda {

// Lane 4 g + t of a warp: it has an octet of rows g, g + 8, ... of a chunk, and sums of rows g and
// g + 8 with columns 2 t and 2 t + 1.
__device__ inline int lane_row() { return lane() / 4; }
__device__ inline int lane_octet() { return lane() % 4; }
__device__ inline int warp_index() { return threadIdx.x / kWarpSize; }

// sums [16, 8] += w [16, 32] x [8, 32]^T. Lane 4 g + t has elements 8 t to 8 t + 7 of rows g
// (`low`) and g + 8 (`high`) of w, and of row g of x. The tensor core takes them for other columns
// than they are, of both operands the same: their products are added up all the same.
template <typename T>
__device__ void multiply_chunk(float (&sums)[4], const Octet& low, const Octet& high,
                               const Octet& x) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    const uint32_t a[] = {low.words[half], high.words[half], low.words[half + 1],
                          high.words[half + 1]};
    const uint32_t b[] = {x.words[half], x.words[half + 1]};
    mma_16x8x16<T>(sums, a, b);
  }
}

template <typename T>
__device__ uint16_t operand_bits(float x) {
  const T element = rounded<T>(x);
  uint16_t bits;
  std::memcpy(&bits, &element, sizeof(bits));
  return bits;
}

// Rows of a weight in octets. Beyond its rows and columns it is 0.
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

  // Begins to copy them to shared memory, where they are known to be there after the next wait for
  // the thread's groups.
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

// Octets of a row of any dtype, rounded to T, for `count` rows at once; what is beyond `depth` is
// 0. `from` gives where each row begins.
template <typename T, typename scalar_t, int kCount, typename From>
__device__ void rounded_octets(Octet (&octets)[kCount], const From& from, int column, int depth,
                               bool aligned) {
  constexpr int kWide = kVectorBytes / sizeof(scalar_t);
  if (aligned && column + kOctet <= depth) {
    Vector<scalar_t, kWide> vectors[kCount][kOctet / kWide];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int v = 0; v < kOctet / kWide; ++v) {
        vectors[n][v] = read<kWide>(from(n) + column + v * kWide);
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
    }
    return;
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    octets[n] = {};
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float x = column + i < depth ? load<float>(from(n)[column + i]) : 0.0f;
      octets[n].words[i / 2] |= static_cast<uint32_t>(operand_bits<T>(x)) << (16 * (i % 2));
    }
  }
}

}  // namespace accumext::cuda
