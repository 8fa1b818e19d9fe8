// The kernel that follows the softmax if tokens are their own targets.
#pragma once

#include <cstdint>

#include "cuda/decoder/matrix.h"
#include "cuda/device.cuh"

namespace accumext::cuda {

// Sets the exps of the tokens, which are their own targets, to 0.
//
//   grid    as many blocks as have a thread per row    block   kBlockSize threads
//   reads   tokens, int64, [rows]
//   writes  an element of each row of exps, any dtype, [rows, columns]
__global__ void __launch_bounds__(kBlockSize)
    clear_tokens_kernel(AnyMatrix exps, Column<const int64_t> tokens, int64_t count,
                        int64_t columns) {
  const int64_t row = int64_t{blockIdx.x} * kBlockSize + threadIdx.x;
  if (row >= count || tokens[row] >= columns) return;  // padding may be beyond the vocabulary
  with_type(exps.dtype, [&](auto type) {
    using exp_t = decltype(type);
    *exps.as<exp_t>().at(row, tokens[row]) = rounded<exp_t>(0.0f);
  });
}

}  // namespace accumext::cuda
