// The inner loops of the CPU kernels, compiled once for each instruction set: which one the
// processor has is known only at run time.
#pragma once

#include "common/chunks.h"
#include "common/operands.h"
#include "math/norm.h"

namespace accumext::cpu {

// main_grad = (overwrite ? 0 : main_grad) + grad * (inv_scale * clip_coef).
struct Accumulation {
  double inv_scale;
  double clip_coef;
  bool overwrite;
  bool streamed;  // with overwrite: write past the caches
};

// main_grad = round(grad), to nearest without a seed.
struct Rounding {
  const int64_t* seed;  // or null
  bool streamed;        // write past the caches
};

// Each function works on one chunk. A partial tells whether every grad is finite.
struct Kernels {
  // Returns the terms of |grad * inv_scale|.
  Partial (*norm)(const Span& grad, const Chunk& chunk, NormKind kind, double p, double inv_scale);

  // Accumulates; returns the squares of the new main_grad.
  Partial (*accumulate)(const Pair& pair, const Chunk& chunk, const Accumulation& how);

  // grad = grad * factor.
  void (*scale)(const Span& grad, const Chunk& chunk, double factor);

  // Copies grad to main_grad. layout is read only if there is a seed.
  void (*copy_rounded)(const Pair& pair, const Layout<3>& layout, const Chunk& chunk,
                       const Rounding& how);
};

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace accumext::cpu
