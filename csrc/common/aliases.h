// Memory that arguments of a call share: no argument may overlap another one that is written.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/operands.h"
#include "common/overlap.h"

namespace accumext {

// One operand's elements.
template <int kOperands>
struct Place {
  const void* data;
  Dtype dtype;
  int64_t numel;
  const Layout<kOperands>& layout;
  int operand;

  int64_t address() const { return static_cast<int64_t>(reinterpret_cast<intptr_t>(data)); }

  Range range(int64_t owner) const {
    int64_t last = layout.empty() ? numel - 1 : 0;
    for (const Dim<kOperands>& dim : layout) last += dim.stride[operand] * (dim.size - 1);
    return {address(), address() + (last + 1) * size_of(dtype), owner};
  }

  Lattice lattice() const {
    const Range extent = range(0);
    Lattice result{extent.begin, extent.end - extent.begin, {}};
    for (const Dim<kOperands>& dim : layout) {
      const int64_t stride = dim.stride[operand] * size_of(dtype);
      if (stride > 0 && dim.size > 1) result.dims.push_back({dim.size, {stride}});
    }
    return result;
  }
};

inline Place<1> place(const Span& span) {
  return {span.data, span.dtype, span.numel, span.layout, 0};
}
inline Place<2> main_place(const Pair& pair) {
  return {pair.main_grad, pair.main_dtype, pair.numel, pair.layout, 0};
}
inline Place<2> grad_place(const Pair& pair) {
  return {pair.grad, pair.grad_dtype, pair.numel, pair.layout, 1};
}

// A number in memory: found_inf, or a factor that is a tensor.
struct Cell {
  const void* data;  // null: none
  Dtype dtype;

  bool meets(const Range& range) const {
    const auto address = static_cast<int64_t>(reinterpret_cast<intptr_t>(data));
    return address < range.end && range.begin < address + size_of(dtype);
  }
};

inline bool meets(const Cell& cell, const auto& place) {
  if (cell.data == nullptr || place.numel == 0 || !cell.meets(place.range(0))) return false;
  const auto address = static_cast<int64_t>(reinterpret_cast<intptr_t>(cell.data));
  return share_memory(place.lattice(), {address, size_of(cell.dtype), {}});
}

inline bool meets(const Cell& a, const Cell& b) {
  static const Layout<1> none;
  return a.data != nullptr && meets(b, Place<1>{a.data, a.dtype, 1, none, 0});
}

// Tells whether a gradient is its main gradient, element by element.
inline bool is_in_place(const Pair& pair) {
  if (pair.main_grad != pair.grad || pair.main_dtype != pair.grad_dtype) return false;
  return std::all_of(pair.layout.begin(), pair.layout.end(),
                     [](const Dim<2>& dim) { return dim.stride[0] == dim.stride[1]; });
}

// Tells whether two of these tensors share memory.
inline bool share_memory(const std::vector<Span>& spans) {
  std::vector<Range> ranges;
  ranges.reserve(spans.size());
  for (size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].numel > 0) ranges.push_back(place(spans[i]).range(static_cast<int64_t>(i)));
  }
  return WrittenRanges(std::move(ranges)).any_pair([&](int64_t i, int64_t j) {
    return share_memory(place(spans[i]).lattice(), place(spans[j]).lattice());
  });
}

// Tells whether a main gradient shares memory with another one, or with a gradient but itself.
inline bool share_memory(const std::vector<Pair>& pairs) {
  std::vector<Range> ranges;
  ranges.reserve(pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i].numel > 0) ranges.push_back(main_place(pairs[i]).range(static_cast<int64_t>(i)));
  }
  WrittenRanges written(std::move(ranges));
  if (written.any_pair([&](int64_t i, int64_t j) {
        return share_memory(main_place(pairs[i]).lattice(), main_place(pairs[j]).lattice());
      })) {
    return true;
  }
  for (size_t j = 0; j < pairs.size(); ++j) {
    if (pairs[j].numel == 0) continue;
    const auto shares = [&](int64_t i) {
      if (i == static_cast<int64_t>(j) && is_in_place(pairs[j])) return false;
      return share_memory(main_place(pairs[i]).lattice(), grad_place(pairs[j]).lattice());
    };
    if (written.any_meeting(grad_place(pairs[j]).range(0), shares)) return true;
  }
  return false;
}

}  // namespace accumext
