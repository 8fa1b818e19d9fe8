// The launch of the kernels that look at every chunk of rows before the best words are known.
#pragma once

#include <algorithm>

#include "cuda/decoder/best_words.cuh"
#include "cuda/enqueue.h"

namespace accumext::cuda {

// As many blocks as the device holds at once, or as there are chunks.
template <typename T, typename... Parameters>
void launch_chunks(const Queue& queue, void (*kernel)(Softmax<T>, Parameters...), int resident,
                   const Softmax<T>& call, const std::type_identity_t<Parameters>&... arguments) {
  const int64_t rows = call.tiles.rows;
  const int64_t share = (int64_t{resident} * queue.multiprocessors() + rows - 1) / rows;
  queue.launch(kernel, rows * std::min(call.tiles.chunks(), share), kBlockSize, call, arguments...);
}

// Memory for the results of the chunks and, if best.size > 0, for the search.
template <typename T>
Tensor chunk_memory(const Queue& queue, Softmax<T>& call, Best<T>& best) {
  const size_t of_best = best_workspace(call.tiles, best, nullptr);
  const auto bytes = static_cast<int64_t>(of_best + softmax_workspace(call, false, nullptr));
  const Tensor memory = queue.empty({bytes}, torch::headeronly::ScalarType::Byte);
  auto* const data = static_cast<std::byte*>(memory.data_ptr());
  best_workspace(call.tiles, best, data);
  softmax_workspace(call, false, data + of_best);
  return memory;
}

}  // namespace accumext::cuda
