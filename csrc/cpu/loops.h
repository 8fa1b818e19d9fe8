// How a CPU kernel walks its tensors: chunks in parallel, blocks of lanes within a chunk.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "chunks.h"
#include "layout.h"
#include "math/accumulate.h"

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

template <typename acc_t, typename scalar_t>
acc_t load(scalar_t x) {
  return static_cast<acc_t>(x);
}

// PyTorch rounds double to half by way of float, and so does this.
template <typename scalar_t, typename acc_t>
scalar_t rounded(acc_t x) {
  if constexpr (std::is_same_v<scalar_t, double>) {
    return x;
  } else {
    return static_cast<scalar_t>(static_cast<float>(x));
  }
}

inline double value(const Scalar& scalar) {
  if (scalar.data == nullptr) return scalar.value;
  return with_type(scalar.dtype, [&](auto type) {
    return load<double>(*static_cast<const decltype(type)*>(scalar.data));
  });
}

// Elements that are handled together and partial sums that are kept apart, so that the compiler may
// use vector registers without reordering a sum.
constexpr int kLanes = 16;

template <typename acc_t>
struct Lanes {
  acc_t lane[kLanes];

  explicit Lanes(acc_t x) { std::fill(lane, lane + kLanes, x); }

  template <typename Combine>
  acc_t folded(const Combine& combine) const {
    acc_t total = lane[0];
    for (int i = 1; i < kLanes; ++i) total = combine(total, lane[i]);
    return total;
  }
};

// Calls body(at, count) for up to kLanes elements at a time, in memory order: element `lane` of
// operand k is at offset at(k, lane). A full block has a constant count, and a dense layout a
// constant stride.
template <typename At, typename Body>
void for_each_block_of_run(int64_t size, const At& at, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    body([&](int k, int lane) { return at(k, i + lane); }, std::integral_constant<int, kLanes>());
  }
  if (i < size) {
    body([&](int k, int lane) { return at(k, i + lane); }, static_cast<int>(size - i));
  }
}

template <int kOperands, typename Body>
void for_each_block(const Layout<kOperands>& layout, const Chunk& chunk, const Body& body) {
  if (layout.empty()) {
    const auto at = [&](int, int64_t i) { return chunk.begin + i; };
    for_each_block_of_run(chunk.end - chunk.begin, at, body);
    return;
  }
  const Dim<kOperands>& inner = layout.back();
  for (int64_t begin = chunk.begin; begin < chunk.end;) {
    int64_t offset[kOperands] = {};
    int64_t index = begin;
    for (auto dim = layout.rbegin(); dim != layout.rend(); ++dim) {
      for (int k = 0; k < kOperands; ++k) offset[k] += index % dim->size * dim->stride[k];
      index /= dim->size;
    }
    const int64_t size = std::min(chunk.end - begin, inner.size - begin % inner.size);
    const auto at = [&](int k, int64_t i) { return offset[k] + i * inner.stride[k]; };
    for_each_block_of_run(size, at, body);
    begin += size;
  }
}

// f(chunk, its index) for every chunk, in parallel.
template <typename F>
void for_each_chunk(const std::vector<Chunk>& chunks, const F& f) {
  constexpr int64_t kElementsPerThread = 32768;  // as at::internal::GRAIN_SIZE
  int64_t elements = 0;
  for (const Chunk& chunk : chunks) elements += chunk.end - chunk.begin;
  const int64_t count = static_cast<int64_t>(chunks.size());
  const int64_t grain = 1 + kElementsPerThread * count / (elements + 1);
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(chunks[i], i);
  });
}

}  // namespace accumext::cpu
