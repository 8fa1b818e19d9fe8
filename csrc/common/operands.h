// A kernel's view of its tensors: no torch, so that device code may include it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/layout.h"

namespace accumext {

enum class Dtype : int32_t { kHalf, kBFloat16, kFloat, kDouble };  // in this order: arguments.h

inline int64_t size_of(Dtype dtype) {  // bytes
  switch (dtype) {
    case Dtype::kHalf:
    case Dtype::kBFloat16:
      return 2;
    case Dtype::kFloat:
      return 4;
    default:
      return 8;
  }
}

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

// A target (main_grad), its source (grad) and the number of each element in row-major order.
struct NumberedPair {
  Pair pair;
  int64_t numel;
  Layout<3> layout;  // strides: main_grad, grad, number
  int64_t number;    // of the pair in its list
};

// A number on the host, or a 0-dim tensor that only the device reads.
struct Scalar {
  const void* data = nullptr;
  Dtype dtype = Dtype::kDouble;
  double value = 1.0;  // if data is null
};

template <typename Operand>
std::vector<int64_t> numels(const std::vector<Operand>& operands) {
  std::vector<int64_t> result;
  result.reserve(operands.size());
  for (const Operand& operand : operands) result.push_back(operand.numel);
  return result;
}

// The gradient alone, to be read only.
inline Span grad_of(const Pair& pair) {
  Layout<1> dims;
  dims.reserve(pair.layout.size());
  for (const Dim<2>& dim : pair.layout) dims.push_back({dim.size, {dim.stride[1]}});
  return {const_cast<void*>(pair.grad), pair.grad_dtype, pair.numel, simplified(std::move(dims))};
}

// The dtype in which norms of these operands are reported: float64 if one of them is, else float32.
template <typename Operand>
Dtype norm_dtype(const std::vector<Operand>& operands, Dtype Operand::* dtype) {
  for (const Operand& operand : operands) {
    if (operand.*dtype == Dtype::kDouble) return Dtype::kDouble;
  }
  return Dtype::kFloat;
}

}  // namespace accumext
