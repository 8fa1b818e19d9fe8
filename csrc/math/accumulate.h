// The arithmetic of unscaling and accumulating one element. Every operation is rounded once, in
// acc_t, as PyTorch rounds `main_grad + grad * factor`: the build forbids contraction to a fused
// multiply-add.
#pragma once

#include <type_traits>

#include "math/host_device.h"

namespace accumext {

// double if either tensor is double, else float.
template <typename... scalar_t>
using acc_type = std::conditional_t<(std::is_same_v<scalar_t, double> || ...), double, float>;

template <typename acc_t>
ACCUMEXT_HOST_DEVICE inline acc_t scaled(acc_t grad, acc_t factor) {
  return grad * factor;
}

template <typename acc_t>
ACCUMEXT_HOST_DEVICE inline acc_t accumulated(acc_t main_grad, acc_t grad, acc_t factor) {
  return main_grad + scaled(grad, factor);
}

// 0 for a finite x, NaN for +-inf and NaN: probes can be added, whereas flags need a branch.
template <typename acc_t>
ACCUMEXT_HOST_DEVICE inline acc_t nonfinite_probe(acc_t x) {
  return x - x;
}

template <typename acc_t>
ACCUMEXT_HOST_DEVICE inline bool is_finite_probe(acc_t probe) {
  return probe == acc_t(0);
}

}  // namespace accumext
