// The places of the elements of tensors of one shape, described by as few dimensions as possible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace accumext {

template <int kOperands>
struct Dim {
  int64_t size;
  int64_t stride[kOperands];  // elements
};

// Dimensions, outermost first. None: every operand is dense, in the same order.
template <int kOperands>
using Layout = std::vector<Dim<kOperands>>;

// Sorts the dimensions by the first operand's strides, for the best access to its memory, and joins
// those that every operand steps through as one.
template <int kOperands>
Layout<kOperands> simplified(Layout<kOperands> dims) {
  std::erase_if(dims, [](const Dim<kOperands>& dim) { return dim.size == 1; });
  std::stable_sort(dims.begin(), dims.end(), [](const Dim<kOperands>& a, const Dim<kOperands>& b) {
    return a.stride[0] > b.stride[0];
  });
  const auto join = [](const Dim<kOperands>& outer, const Dim<kOperands>& inner) {
    for (int k = 0; k < kOperands; ++k) {
      if (outer.stride[k] != inner.stride[k] * inner.size) return false;
    }
    return true;
  };
  Layout<kOperands> joined;
  for (const Dim<kOperands>& dim : dims) {
    if (!joined.empty() && join(joined.back(), dim)) {
      const int64_t outer_size = joined.back().size;
      joined.back() = dim;
      joined.back().size *= outer_size;
    } else {
      joined.push_back(dim);
    }
  }
  const bool dense =
      joined.size() == 1 && std::all_of(joined[0].stride, joined[0].stride + kOperands,
                                        [](int64_t stride) { return stride == 1; });
  return dense ? Layout<kOperands>{} : joined;
}

}  // namespace accumext
