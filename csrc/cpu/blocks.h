// The walk of a CPU kernel over part of a tensor, whatever its strides: in blocks of elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <tuple>
#include <type_traits>
#include <utility>

#include "common/chunks.h"
#include "common/layout.h"

namespace accumext::cpu {
namespace {

// Visits elements in memory order, with their offsets in each operand.
template <int kOperands>
class Walker {
 public:
  // dense operands: one dimension of stride 1, of which only the end matters
  Walker(const Layout<kOperands>& layout, const Chunk& chunk)
      : dims_(layout.empty() ? &dense_ : layout.data()), last_(std::ssize(layout) - 1) {
    last_ = std::max<int64_t>(last_, 0);
    dense_.size = chunk.end;
    std::fill_n(dense_.stride, kOperands, 1);
    int64_t at = chunk.begin;
    std::fill_n(index_, last_ + 1, 0);
    for (int64_t d = last_; d > 0; --d) {
      step(d, at % dims_[d].size);
      at /= dims_[d].size;
    }
    step(0, at);
  }

  Walker(const Walker&) = delete;

  // True if every operand is dense along the innermost dimension, and it is not short.
  bool has_runs(int64_t shortest) const {
    bool dense = dims_[last_].size >= shortest;
    for (const int64_t stride : dims_[last_].stride) dense = dense && stride == 1;
    return dense;
  }

  // Elements from here to the end of the innermost dimension.
  int64_t run() const { return dims_[last_].size - index_[last_]; }

  int64_t offset(int operand) const { return offset_[operand]; }

  // Goes on by `count` elements, at most to the end of the run.
  void advance(int64_t count) {
    int64_t d = last_;
    step(d, count);
    while (index_[d] == dims_[d].size && d > 0) {
      step(d, -dims_[d].size);
      step(--d, 1);
    }
  }

 private:
  static constexpr int kMaxDims = 64;  // of 2 elements or more, in an int64 number of elements

  void step(int64_t d, int64_t count) {
    index_[d] += count;
    for (int k = 0; k < kOperands; ++k) offset_[k] += count * dims_[d].stride[k];
  }

  Dim<kOperands> dense_;
  const Dim<kOperands>* dims_;
  int64_t last_;             // the innermost dimension
  int64_t index_[kMaxDims];  // those up to last_
  int64_t offset_[kOperands] = {};
};

// An operand whose elements are their own offsets.
struct Numbers {
  int64_t first = 0;

  Numbers operator+(int64_t offset) const { return {first + offset}; }
  int64_t operator[](int64_t offset) const { return first + offset; }
};

// Calls body(count, data...) for the next `left` elements, kBlock at a time. If a whole block is
// contiguous, count is a constant. Other blocks are gathered, padded with zeros, and scattered
// back. Data: pointers, or Numbers, which are gathered like elements and also become a pointer.
template <int kBlock, typename Body, typename... Data>
[[gnu::always_inline]] inline void for_each_block(Walker<sizeof...(Data)>& walker, int64_t left,
                                                  const Body& body, Data... data) {
  constexpr int kOperands = sizeof...(Data);
  constexpr auto kWhole = std::integral_constant<int, kBlock>();
  const bool runs = walker.has_runs(kBlock);
  const auto loop = [&]<size_t... k>(std::index_sequence<k...>) __attribute__((always_inline)) {
    while (left > 0) {
      const int64_t together = std::min(left, runs ? walker.run() : kBlock);
      if (runs && together >= kBlock) {
        const int64_t elements = together / kBlock * kBlock;
        for (int64_t i = 0; i < elements; i += kBlock) {
          body(kWhole, (data + walker.offset(k) + i)...);
        }
        walker.advance(elements);
        left -= elements;
        continue;
      }
      const int count = static_cast<int>(together);
      int64_t offset[kOperands][kBlock];
      for (int i = 0; i < count; ++i, walker.advance(1)) {
        ((offset[k][i] = walker.offset(k)), ...);
      }
      std::tuple<std::remove_cvref_t<decltype(data[0])>[kBlock]...> blocks{};
      const auto get = [&](auto* block, const auto& from, const int64_t* at) {
        for (int i = 0; i < count; ++i) block[i] = from[at[i]];
      };
      const auto put = [&](const auto* block, const auto& to, const int64_t* at) {
        if constexpr (std::is_assignable_v<decltype(to[0]), decltype(*block)>) {
          for (int i = 0; i < count; ++i) to[at[i]] = block[i];
        }
      };
      (get(std::get<k>(blocks), data, offset[k]), ...);
      body(count, std::get<k>(blocks)...);
      (put(std::get<k>(blocks), data, offset[k]), ...);
      left -= count;
    }
  };
  loop(std::index_sequence_for<Data...>());
}

}  // namespace
}  // namespace accumext::cpu
