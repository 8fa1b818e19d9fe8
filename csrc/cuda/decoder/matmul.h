// Matrix products of torch, on the current stream of their tensors' device.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/version.h>

#include "common/arguments.h"

namespace accumext::cuda {

// out = a b: [m, k] and [k, n] in one dtype, [m, n] in that dtype or, if that is half precision, in
// float: sums have the dtype of out. Products in float obey torch's setting of TF32.
inline void matmul(const Tensor& a, const Tensor& b, const Tensor& out) {
  using torch::stable::detail::from;
  const auto dtype = out.scalar_type();
  StableIValue result;
  if (a.scalar_type() == dtype) {
    StableIValue stack[] = {from(a), from(b), from(out)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack, TORCH_ABI_VERSION));
    result = stack[0];
  } else {
    StableIValue stack[] = {from(a), from(b), from(dtype), from(out)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::mm", "dtype_out", stack, TORCH_ABI_VERSION));
    result = stack[0];
  }
  torch::stable::detail::to<Tensor>(result);  // a second handle of `out`, to be released here
}

// Tells whether `matmul` can keep sums in T of operands of this dtype.
template <typename T>
bool multiplies(Dtype operands) {
  if constexpr (std::is_same_v<T, double>) {
    return operands == Dtype::kDouble;
  } else {
    return operands != Dtype::kDouble;
  }
}

}  // namespace accumext::cuda
