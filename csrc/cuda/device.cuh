// How a CUDA kernel finds its tensors: a table in device memory, one block per chunk. No torch
// here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "chunks.h"
#include "layout.h"
#include "math/norm.h"
#include "operands.h"

namespace accumext::cuda {

constexpr int kBlockSize = 512;  // threads; a power of two, for the reduction tree

// A Span or a Pair whose layout lies in the table's array of dimensions.
template <int kOperands>
struct Entry {
  void* data[kOperands];
  Dtype dtype[kOperands];
  int64_t first_dim;
  int64_t dims;  // 0: every operand is dense, in the same order
};

template <int kOperands>
struct Table {
  const Chunk* chunks;              // [blocks of the grid]
  const Entry<kOperands>* entries;  // [tensors]
  const Dim<kOperands>* dims;

  // Offsets of element i of a tensor, in elements, for each operand.
  __device__ void locate(const Entry<kOperands>& entry, int64_t i,
                         int64_t (&offset)[kOperands]) const {
    for (int k = 0; k < kOperands; ++k) offset[k] = entry.dims == 0 ? i : 0;
    for (int64_t d = entry.dims - 1; d >= 0; --d) {
      const Dim<kOperands>& dim = dims[entry.first_dim + d];
      for (int k = 0; k < kOperands; ++k) offset[k] += i % dim.size * dim.stride[k];
      i /= dim.size;
    }
  }
};

// Call f with a value of the C++ type of dtype.
template <typename F>
__device__ auto with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kHalf:
      return f(__half());
    case Dtype::kBFloat16:
      return f(__nv_bfloat16());
    case Dtype::kFloat:
      return f(float());
    default:
      return f(double());
  }
}

template <typename acc_t, typename scalar_t>
__device__ acc_t load(scalar_t x) {
  if constexpr (std::is_same_v<scalar_t, double>) {
    return static_cast<acc_t>(x);
  } else {
    return static_cast<acc_t>(static_cast<float>(x));
  }
}

// PyTorch rounds double to half by way of float, and so does this.
template <typename scalar_t, typename acc_t>
__device__ scalar_t rounded(acc_t x) {
  if constexpr (std::is_same_v<scalar_t, double>) {
    return x;
  } else if constexpr (std::is_same_v<scalar_t, __half>) {
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<float>(x);
  }
}

__device__ inline double value(const Scalar& scalar) {
  if (scalar.data == nullptr) return scalar.value;
  return with_type(scalar.dtype, [&](auto type) {
    return load<double>(*static_cast<const decltype(type)*>(scalar.data));
  });
}

// The partials of a block's threads as one, in a fixed tree. Every thread of the block must call
// it; the result is thread 0's.
template <NormKind kKind>
__device__ Partial block_combined(const Norm<kKind>& norm, Partial mine) {
  __shared__ Partial shared[kBlockSize];
  shared[threadIdx.x] = mine;
  for (int half = kBlockSize / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      shared[threadIdx.x] = norm.combine(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
  }
  return shared[0];
}

}  // namespace accumext::cuda
