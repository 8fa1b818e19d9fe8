// A list of tensors as chunks of bounded size: the unit of work of every kernel, and of every
// partial sum, so that results do not depend on how many threads or blocks share the work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace accumext {

// Elements: enough to hide the start of a block, few enough to balance the work.
constexpr int64_t kChunkSize = 65536;

// Elements [begin, end) of one tensor of the list.
struct Chunk {
  int64_t tensor;
  int64_t begin;
  int64_t end;
};

// Tensors in order, each cut every chunk_size elements. An empty tensor has no chunk.
inline std::vector<Chunk> plan_chunks(const std::vector<int64_t>& numels,
                                      int64_t chunk_size = kChunkSize) {
  std::vector<Chunk> chunks;
  for (int64_t tensor = 0; tensor < static_cast<int64_t>(numels.size()); ++tensor) {
    const int64_t numel = numels[tensor];
    for (int64_t begin = 0; begin < numel; begin += chunk_size) {
      chunks.push_back({tensor, begin, std::min(numel, begin + chunk_size)});
    }
  }
  return chunks;
}

}  // namespace accumext
