// The launch of a recurrent layer's kernels, by the kind of its cell.
#pragma once

#include <type_traits>

#include "common/cell_kind.h"
#include "cuda/decoder/rnn_units.cuh"
#include "cuda/enqueue.h"

namespace accumext::cuda {

// Calls f with the kind as a constant.
template <typename F>
auto with_kind(CellKind kind, const F& f) {
  switch (kind) {
    case CellKind::kGru:
      return f(std::integral_constant<CellKind, CellKind::kGru>());
    case CellKind::kLstm:
      return f(std::integral_constant<CellKind, CellKind::kLstm>());
    case CellKind::kRnnTanh:
      return f(std::integral_constant<CellKind, CellKind::kRnnTanh>());
    default:
      return f(std::integral_constant<CellKind, CellKind::kRnnRelu>());
  }
}

// Launches a kernel with one thread per unit of each row.
template <typename... Parameters>
void launch_units(const Queue& queue, void (*kernel)(Parameters...), int64_t rows, int64_t units,
                  const std::type_identity_t<Parameters>&... arguments) {
  queue.launch(kernel, rows * blocks_per_row(units), kBlockSize, arguments...);
}

}  // namespace accumext::cuda
