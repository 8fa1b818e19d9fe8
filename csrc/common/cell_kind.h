// The kind of a recurrent cell, as operators are given it.
#pragma once

#include "common/arguments.h"
#include "math/gates.h"

namespace accumext {

inline CellKind cell_kind(int64_t kind) {
  require(kind >= 0 && kind <= static_cast<int64_t>(CellKind::kRnnRelu));
  return static_cast<CellKind>(kind);
}

}  // namespace accumext
