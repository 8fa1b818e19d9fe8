// What a kernel is told about its tensors: no torch, so that device code may include it.
#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"

namespace accumext {

enum class Dtype : int32_t { kHalf, kBFloat16, kFloat, kDouble };

// One tensor that is reduced or scaled.
struct Span {
  void* data;
  Dtype dtype;
  int64_t numel;
  Layout<1> layout;
};

// A main gradient and the gradient that goes into it.
struct Pair {
  void* main_grad;
  const void* grad;
  Dtype main_dtype;
  Dtype grad_dtype;
  int64_t numel;
  Layout<2> layout;  // strides: main_grad, grad
};

// A number on the host, or a 0-dim tensor that only the device reads.
struct Scalar {
  const void* data = nullptr;
  Dtype dtype = Dtype::kDouble;
  double value = 1.0;  // where data is null
};

template <typename Operand>
std::vector<int64_t> numels(const std::vector<Operand>& operands) {
  std::vector<int64_t> result;
  result.reserve(operands.size());
  for (const Operand& operand : operands) result.push_back(operand.numel);
  return result;
}

}  // namespace accumext
