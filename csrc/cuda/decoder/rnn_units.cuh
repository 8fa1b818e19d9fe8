// Parts shared by the elementwise kernels of a recurrent layer's step, which run between the
// products with its weights. One launch each.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decoder/matrix.h"
#include "cuda/device.cuh"
#include "math/gates.h"

namespace accumext::cuda {

template <CellKind kKind>
constexpr int kGates = gate_count(kKind);  // device code may use the constant, not call a constexpr

// Rows are cut into blocks, so that all threads of a block share a row. A thread takes one unit:
// these launches are short, and the latency of a few accesses takes most of their time.
inline int64_t blocks_per_row(int64_t units) { return (units + kBlockSize - 1) / kBlockSize; }

struct Unit {
  int64_t row, unit;

  __device__ explicit Unit(int64_t units) {
    const int64_t blocks = (units + kBlockSize - 1) / kBlockSize;
    row = blockIdx.x / blocks;
    unit = blockIdx.x % blocks * kBlockSize + threadIdx.x;
  }
};

__device__ inline bool is_live(const Column<const bool>& active, int64_t row) {
  return active.data == nullptr || active[row];
}

// Rounds x to the dtype of a matrix and stores it; the matrix may be null.
template <typename T>
__device__ void put(const AnyMatrix& matrix, int64_t row, int64_t column, T x) {
  if (matrix.data == nullptr) return;
  with_type(matrix.dtype, [&](auto type) {
    using scalar_t = decltype(type);
    *matrix.as<scalar_t>().at(row, column) = rounded<scalar_t>(x);
  });
}

template <typename T>
__device__ T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

}  // namespace accumext::cuda
