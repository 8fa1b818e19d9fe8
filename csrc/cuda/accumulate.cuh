// The kernel that accumulates a list of gradients into main gradients. accumulate_ launches it and
// then finish_kernel; unscale_check_clip_accumulate_ norm_kernel, finish_kernel, and then this one.
#pragma once

#include "cuda/device.cuh"
#include "cuda/norm.cuh"
#include "cuda/reduce.cuh"
#include "math/accumulate.h"

namespace accumext::cuda {

template <typename main_t, typename grad_t, int kCount>
struct LoadedPair {
  Vector<main_t, kCount> main_grad;  // zeros with overwrite
  Vector<grad_t, kCount> grad;
};

// main_grad = (overwrite ? 0 : main_grad) + grad * (inv_scale * clip->coef); partials[c] = the
// squares of what chunk c now stores, and whether each of its grads is finite.
//
//   grid    any                          block   kBlockSize threads, over a chunk at a time
//   reads   grad, any dtype, [chunk], once; main_grad, once, unless overwrite; inv_scale; clip, or
//           null
//   writes  main_grad, any dtype, [chunk], once; partials, [chunks], unless null; nothing at all if
//           clip->skip
//   So 10 bytes per element of a half grad and a float main_grad, 6 with overwrite. main_grad and
//   grad may be the same memory, hence no __restrict__ on them.
template <size_t kTableBytes>
__global__ void __launch_bounds__(kBlockSize, kResidentBlocks)
    accumulate_kernel(const __grid_constant__ Table<2, kTableBytes> table, Scalar inv_scale,
                      const Clip* __restrict__ clip, bool overwrite,
                      Partial* __restrict__ partials) {
  if (clip != nullptr && clip->skip) return;
  const Norm<NormKind::kSquares> norm{2.0};
  reduce_chunks(table, norm, partials, [&](const Entry<2>& entry, int64_t chunk) {
    return with_type(entry.dtype[0], [&](auto main_type) {
      return with_type(entry.dtype[1], [&](auto grad_type) {
        using main_t = decltype(main_type);
        using grad_t = decltype(grad_type);
        using acc_t = acc_type<main_t, grad_t>;
        using norm_t = acc_type<main_t>;
        main_t* main_grad = data_of<main_t>(entry, 0);
        const grad_t* grad = data_of<const grad_t>(entry, 1);
        const double coef = clip != nullptr ? clip->coef : 1.0;
        const acc_t factor = scaled(static_cast<acc_t>(coef), static_cast<acc_t>(value(inv_scale)));
        ThreadSum<NormKind::kSquares, norm_t> sum{norm};
        acc_t probe = 0;
        walk<kInFlight<main_t, grad_t>, main_t, grad_t>(
            table, entry, chunk,
            [&]<int kCount, bool kAligned>(Access<kCount, kAligned>, const auto& at) {
              LoadedPair<main_t, grad_t, kCount> x = {};
              x.grad = read<kCount, kAligned>(grad + at.of[1]);
              if (!overwrite) x.main_grad = read<kCount>(main_grad + at.of[0]);
              return x;
            },
            [&]<int kCount>(const LoadedPair<main_t, grad_t, kCount>& x, const auto& at) {
              Vector<main_t, kCount> stored;
              sum.add(kCount, [&](int n) {
                const acc_t g = load<acc_t>(x.grad.get(n));
                probe += nonfinite_probe(g);
                stored.set(
                    n, rounded<main_t>(
                           overwrite ? scaled(g, factor)
                                     : accumulated(load<acc_t>(x.main_grad.get(n)), g, factor)));
                return norm.term(load<norm_t>(stored.get(n)));
              });
              write(main_grad + at.of[0], stored);
            });
        return Partial{sum.total, is_finite_probe(probe)};
      });
    });
  });
}

}  // namespace accumext::cuda
