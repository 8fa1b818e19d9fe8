// The kernel that computes a window's factors from a given norm; norm.cuh has the one that computes
// the norm as well.
#pragma once

#include "cuda/closing.cuh"

namespace accumext::cuda {

// Writes the numbers that follow from a norm.
//
//   grid    one block                    block   one thread
//   reads   norm, [], float or double; the tensors among the numbers of closing, []
//   writes  closing.numbers, [3]; closing.flags, [3]
__global__ void close_window_kernel(Scalar norm, Closing closing) {
  close_window(closing, value(norm), /*finite=*/true);
}

}  // namespace accumext::cuda
