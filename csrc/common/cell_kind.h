// The kind of a recurrent cell, as operators are given it.
#pragma once

#include "common/arguments.h"
#include "math/gates.h"

namespace accumext {

// The number of pre-activations of a unit that a backward pass reads. GRU: r, z, and n's parts of x
// and of h; LSTM: i, f, g, o.
constexpr int64_t kPreActivations = 4;

inline CellKind cell_kind(int64_t kind) {
  require(kind >= 0 && kind <= static_cast<int64_t>(CellKind::kRnnRelu));
  return static_cast<CellKind>(kind);
}

}  // namespace accumext
