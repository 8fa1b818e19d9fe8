// How the launchers of a recurrent layer's kernels choose the kind of cell, and launch.
#pragma once

#include <type_traits>

#include "common/arguments.h"
#include "cuda/decoder/rnn_units.cuh"
#include "cuda/enqueue.h"

namespace accumext::cuda {

inline CellKind cell_kind(int64_t kind) {
  require(kind >= 0 && kind <= static_cast<int64_t>(CellKind::kRnnRelu));
  return static_cast<CellKind>(kind);
}

// f(a constant of this kind)
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

// A kernel with one thread per unit of so many rows.
template <typename... Parameters>
void launch_units(const Queue& queue, void (*kernel)(Parameters...), int64_t rows, int64_t units,
                  const std::type_identity_t<Parameters>&... arguments) {
  queue.launch(kernel, rows * blocks_per_row(units), kBlockSize, arguments...);
}

}  // namespace accumext::cuda
