// The kernel that multiplies a list of tensors in place.
#pragma once

#include "cuda/device.cuh"
#include "math/accumulate.h"

namespace accumext::cuda {

// grad = grad * factor; nothing where the factor is exactly 1.
//
//   grid    one block per chunk          block   kBlockSize threads, striding over the chunk
//   reads and writes  grad, any dtype, [end - begin]
__global__ void scale_kernel(Table<1> table, Scalar factor) {
  const double multiplier = value(factor);
  if (multiplier == 1.0) return;
  const Chunk chunk = table.chunks[blockIdx.x];
  const Entry<1> entry = table.entries[chunk.tensor];
  with_type(entry.dtype[0], [&](auto type) {
    using scalar_t = decltype(type);
    using acc_t = acc_type<scalar_t>;
    scalar_t* grad = static_cast<scalar_t*>(entry.data[0]);
    for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += kBlockSize) {
      int64_t offset[1];
      table.locate(entry, i, offset);
      const acc_t x = load<acc_t>(grad[offset[0]]);
      grad[offset[0]] = rounded<scalar_t>(scaled(x, static_cast<acc_t>(multiplier)));
    }
  });
}

}  // namespace accumext::cuda
