// The kernel that multiplies a list of tensors in place: one launch per call of scale_.
#pragma once

#include "cuda/device.cuh"
#include "math/accumulate.h"

namespace accumext::cuda {

// grad = grad * factor; nothing if the factor is exactly 1.
//
//   grid    any                          block   kBlockSize threads, over a chunk at a time
//   reads and writes  grad, any dtype, [chunk], once each: 8 bytes per element of float; no grad at
//                     all if the factor is 1
template <size_t kTableBytes>
__global__ void __launch_bounds__(kBlockSize, kResidentBlocks)
    scale_kernel(const __grid_constant__ Table<1, kTableBytes> table, Scalar factor) {
  const double multiplier = value(factor);
  if (multiplier == 1.0) return;
  const int64_t begin = share(table, blockIdx.x);
  const int64_t end = share(table, blockIdx.x + int64_t{1});
  for_each_chunk(table, begin, end, [&](const Entry<1>& entry, int64_t chunk) {
    with_type(entry.dtype[0], [&](auto type) {
      using scalar_t = decltype(type);
      using acc_t = acc_type<scalar_t>;
      scalar_t* grad = data_of<scalar_t>(entry, 0);
      walk<kInFlight<scalar_t>, scalar_t>(
          table, entry, chunk,
          [&]<int kCount, bool kAligned>(Access<kCount, kAligned>, const auto& at) {
            return read<kCount>(grad + at.of[0]);
          },
          [&]<int kCount>(const Vector<scalar_t, kCount>& x, const auto& at) {
            Vector<scalar_t, kCount> product;
            for (int n = 0; n < kCount; ++n) {
              product.set(n, rounded<scalar_t>(
                                 scaled(load<acc_t>(x.get(n)), static_cast<acc_t>(multiplier))));
            }
            write(grad + at.of[0], product);
          });
    });
  });
}

}  // namespace accumext::cuda
