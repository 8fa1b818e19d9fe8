// The kind of a recurrent cell, as operators are given it.
#pragma once

#include "common/arguments.h"
#include "math/gates.h"

namespace accumext {

// Pre-activations of a unit that a backward pass wants: r, z, n's part of x and n's part of h of a
// GRU; i, f, g, o of an LSTM.
constexpr int64_t kPreActivations = 4;

inline CellKind cell_kind(int64_t kind) {
  require(kind >= 0 && kind <= static_cast<int64_t>(CellKind::kRnnRelu));
  return static_cast<CellKind>(kind);
}

}  // namespace accumext
