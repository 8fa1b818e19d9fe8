// The C++ types behind a Dtype.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "common/operands.h"

namespace accumext::cpu {

// Call f with a value of the C++ type of dtype.
template <typename F>
auto with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kHalf:
      return f(torch::headeronly::Half());
    case Dtype::kBFloat16:
      return f(torch::headeronly::BFloat16());
    case Dtype::kFloat:
      return f(float());
    default:
      return f(double());
  }
}

}  // namespace accumext::cpu
