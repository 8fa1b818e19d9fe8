// Shares the work of a CPU kernel: chunks in parallel, each by the inner loops for this processor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/chunks.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/types.h"
#include "cpu/team.h"

namespace accumext::cpu {

inline const Kernels& kernels() {
  static const Isa isa = widest_isa();
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  return kPortableKernels;
}

inline double value(const Scalar& scalar) {
  if (scalar.data == nullptr) return scalar.value;
  return with_type(scalar.dtype, [&](auto type) {
    return static_cast<double>(*static_cast<const decltype(type)*>(scalar.data));
  });
}

// Tells whether the main gradients are larger than the caches, so that the next reader could not
// find them there.
inline bool is_large(const std::vector<Pair>& pairs) {
  constexpr int64_t kElements = 4 << 20;
  int64_t elements = 0;
  for (const Pair& pair : pairs) elements += pair.numel;
  return elements >= kElements;
}

// Calls f(chunk, its index) for every chunk. Pieces have equally many elements, up to a chunk, not
// equally many chunks: a list may begin with thousands of small tensors.
template <typename F>
void for_each_chunk(const std::vector<Chunk>& chunks, const F& f) {
  constexpr int64_t kCostPerChunk = 512;    // elements that take as long as a chunk's start
  constexpr int64_t kCostPerPiece = 32768;  // as at::internal::GRAIN_SIZE
  std::vector<int64_t> starts;              // cost of all earlier chunks
  starts.reserve(chunks.size());
  int64_t cost = 0;
  for (const Chunk& chunk : chunks) {
    starts.push_back(cost);
    cost += kCostPerChunk + chunk.end - chunk.begin;
  }
  Team::once(cost, kCostPerPiece, [&](int64_t begin, int64_t end, int64_t) {
    const auto first = std::lower_bound(starts.begin(), starts.end(), begin);
    for (size_t i = first - starts.begin(); i < chunks.size() && starts[i] < end; ++i) {
      f(chunks[i], static_cast<int64_t>(i));
    }
  });
}

}  // namespace accumext::cpu
