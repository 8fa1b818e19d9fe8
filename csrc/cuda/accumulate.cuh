// The kernel that accumulates a list of gradients into main gradients.
#pragma once

#include "cuda/device.cuh"
#include "cuda/norm.cuh"
#include "math/accumulate.h"

namespace accumext::cuda {

// main_grad = (overwrite ? 0 : main_grad) + grad * (inv_scale * clip->coef); partials[b] = the
// squares of what chunk b now stores, and whether each of its grads is finite.
//
//   grid    one block per chunk          block   kBlockSize threads, striding over the chunk
//   reads   grad, any dtype, [end - begin]; main_grad unless overwrite; inv_scale; clip, or null
//   writes  main_grad, any dtype, [end - begin]; partials, [grid]; nothing if clip->skip
//   main_grad and grad may be the same memory, hence no __restrict__ on them.
__global__ void accumulate_kernel(Table<2> table, Scalar inv_scale, const Clip* __restrict__ clip,
                                  bool overwrite, Partial* __restrict__ partials) {
  if (clip != nullptr && clip->skip) return;
  const Chunk chunk = table.chunks[blockIdx.x];
  const Entry<2> entry = table.entries[chunk.tensor];
  const Norm<NormKind::kSquares> norm{2.0};
  const double coef = clip != nullptr ? clip->coef : 1.0;
  const Partial mine = with_type(entry.dtype[0], [&](auto main_type) {
    return with_type(entry.dtype[1], [&](auto grad_type) {
      using main_t = decltype(main_type);
      using grad_t = decltype(grad_type);
      using acc_t = acc_type<main_t, grad_t>;
      using norm_t = acc_type<main_t>;
      main_t* main_grad = static_cast<main_t*>(entry.data[0]);
      const grad_t* grad = static_cast<const grad_t*>(entry.data[1]);
      const acc_t factor = scaled(static_cast<acc_t>(coef), static_cast<acc_t>(value(inv_scale)));
      norm_t total = 0;
      acc_t probe = 0;
      for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += kBlockSize) {
        int64_t offset[2];
        table.locate(entry, i, offset);
        const acc_t g = load<acc_t>(grad[offset[1]]);
        probe += nonfinite_probe(g);
        const acc_t updated = overwrite ? scaled(g, factor)
                                        : accumulated(load<acc_t>(main_grad[offset[0]]), g, factor);
        const main_t stored = rounded<main_t>(updated);
        main_grad[offset[0]] = stored;
        total += norm.term(load<norm_t>(stored));
      }
      return Partial{static_cast<double>(total), is_finite_probe(probe)};
    });
  });
  const Partial block = block_combined(norm, mine);
  if (threadIdx.x == 0) partials[blockIdx.x] = block;
}

}  // namespace accumext::cuda
