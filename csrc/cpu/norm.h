// The norm of a list of tensors, for total_norm and for the clip of a micro-batch.
#pragma once

#include <vector>

#include "common/arguments.h"
#include "cpu/loops.h"
#include "math/norm.h"

namespace accumext::cpu {

// A norm after its root, and whether every element that went in was finite.
struct Reduced {
  double norm = 0.0;
  bool finite = true;
};

// The norm of partial(chunk) over all chunks, combined in double and in order, so that the bits do
// not depend on the number of threads.
template <NormKind kKind, typename F>
Reduced reduce(const Norm<kKind>& norm, const std::vector<Chunk>& chunks, const F& partial) {
  if (chunks.empty()) return {};
  std::vector<Partial> partials(chunks.size());
  for_each_chunk(chunks, [&](const Chunk& chunk, int64_t i) { partials[i] = partial(chunk); });
  Partial total = norm.none();
  for (const Partial& next : partials) total = norm.combine(total, next);
  return {norm.root(total.total), total.finite};
}

Reduced norm_of(const std::vector<Span>& grads, double p, double inv_scale);

// Returns the norm in a new 0-dim tensor; writes 1 to found_inf if an element was not finite.
Tensor report(const Reduced& result, Dtype dtype, float* found_inf);

}  // namespace accumext::cpu
