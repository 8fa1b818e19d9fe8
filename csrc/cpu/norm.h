// The norm of a list of tensors, for total_norm and for the clip of a micro-batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "arguments.h"
#include "cpu/loops.h"
#include "math/norm.h"

namespace accumext::cpu {

// A norm after its root, and whether every element that went in was finite.
struct Reduced {
  double norm = 0.0;
  bool finite = true;
};

// The norm of partial(piece) over all pieces of all chunks. Pieces are combined in double and in
// order, so that the bits do not depend on the number of threads; a piece is short, because the
// sums within it may be float.
template <NormKind kKind, typename F>
Reduced reduce(const Norm<kKind>& norm, const std::vector<Chunk>& chunks, const F& partial) {
  constexpr int64_t kPieceSize = 2048;  // elements: 128 additions per lane
  if (chunks.empty()) return {};
  const Partial none = norm.none();
  std::vector<Partial> partials(chunks.size(), none);
  for_each_chunk(chunks, [&](const Chunk& chunk, int64_t i) {
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += kPieceSize) {
      const Chunk piece{chunk.tensor, begin, std::min(chunk.end, begin + kPieceSize)};
      partials[i] = norm.combine(partials[i], partial(piece));
    }
  });
  Partial total = none;
  for (const Partial& next : partials) total = norm.combine(total, next);
  return {norm.root(total.total), total.finite};
}

Reduced norm_of(const std::vector<Span>& grads, double p, double inv_scale);

// norm into a new 0-dim tensor, and 1 into found_inf where an element was not finite.
Tensor report(const Reduced& result, const std::vector<Tensor>& tensors, float* found_inf);

}  // namespace accumext::cpu
