// Kernels of a norm over a list of tensors: partials per chunk, then all of them in one block.
#pragma once

#include "cuda/device.cuh"
#include "math/accumulate.h"
#include "math/norm.h"

namespace accumext::cuda {

// The clip of a micro-batch, decided on the device.
struct Clip {
  double coef;
  bool skip;  // a gradient is not finite and the micro-batch is to be left out
};

// What happens to a norm once it is known.
struct Outcome {
  void* norm;                  // [], of norm_dtype
  Dtype norm_dtype;            // kFloat or kDouble
  float* found_inf = nullptr;  // [], or null
  Clip* clip = nullptr;
  double max_norm = 0.0;   // with clip
  bool if_finite = false;  // with clip
};

// partials[b] = the terms of |grad * inv_scale| over chunk b, and whether each grad is finite.
//
//   grid    one block per chunk          block   kBlockSize threads, striding over the chunk
//   reads   grad, any dtype, [end - begin]; inv_scale
//   writes  partials, [grid]
template <NormKind kKind>
__global__ void norm_kernel(Table<1> table, Norm<kKind> norm, Scalar inv_scale,
                            Partial* __restrict__ partials) {
  const Chunk chunk = table.chunks[blockIdx.x];
  const Entry<1> entry = table.entries[chunk.tensor];
  const Partial mine = with_type(entry.dtype[0], [&](auto type) {
    using scalar_t = decltype(type);
    using acc_t = acc_type<scalar_t>;
    const scalar_t* grad = static_cast<const scalar_t*>(entry.data[0]);
    const acc_t factor = static_cast<acc_t>(value(inv_scale));
    acc_t total = norm.template identity<acc_t>();
    acc_t probe = 0;
    for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += kBlockSize) {
      int64_t offset[1];
      table.locate(entry, i, offset);
      const acc_t x = load<acc_t>(grad[offset[0]]);
      probe += nonfinite_probe(x);
      total = norm.combine(total, norm.term(scaled(x, factor)));
    }
    return Partial{static_cast<double>(total), is_finite_probe(probe)};
  });
  const Partial block = block_combined(norm, mine);
  if (threadIdx.x == 0) partials[blockIdx.x] = block;
}

// The norm of all partials, and what follows from it. Thread t takes partials t, t + kBlockSize,
// ...: the order is fixed by their number alone.
//
//   grid    one block                    block   kBlockSize threads
//   reads   partials, [count]
//   writes  outcome.norm; outcome.found_inf, only 1; outcome.clip
template <NormKind kKind>
__global__ void finish_kernel(const Partial* __restrict__ partials, int64_t count, Norm<kKind> norm,
                              Outcome outcome) {
  Partial mine = norm.none();
  for (int64_t i = threadIdx.x; i < count; i += kBlockSize) mine = norm.combine(mine, partials[i]);
  const Partial all = block_combined(norm, mine);
  if (threadIdx.x != 0) return;
  const double root = count > 0 ? norm.root(all.total) : 0.0;
  if (outcome.found_inf != nullptr && !all.finite) *outcome.found_inf = 1.0f;
  double coef;
  if (outcome.norm_dtype == Dtype::kDouble) {
    *static_cast<double*>(outcome.norm) = root;
    coef = clip_coef(root, outcome.max_norm);
  } else {
    *static_cast<float*>(outcome.norm) = static_cast<float>(root);
    coef = clip_coef(static_cast<float>(root), static_cast<float>(outcome.max_norm));
  }
  if (outcome.clip != nullptr) *outcome.clip = {coef, outcome.if_finite && !all.finite};
}

}  // namespace accumext::cuda
