// The kernel that looks up known inputs in the embedding.
#pragma once

#include <cstdint>

#include "cuda/decoder/feed_back.cuh"

namespace accumext::cuda {

// Writes lookup.rows for the tokens.
//
//   grid    rows    block   kBlockSize threads, over one row
//   reads   tokens, int64, [rows]; of the table as many rows, any dtype; kept, bool, [rows, width]
//   writes  lookup.rows, any dtype, [rows, width]
__global__ void __launch_bounds__(kBlockSize) look_up_kernel(Lookup lookup, const int64_t* tokens) {
  lookup.copy(blockIdx.x, tokens[blockIdx.x], static_cast<int>(threadIdx.x), kBlockSize);
}

}  // namespace accumext::cuda
