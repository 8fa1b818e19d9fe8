// The kernel that finds a window's factors of a norm that is there; norm.cuh has the other one.
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
