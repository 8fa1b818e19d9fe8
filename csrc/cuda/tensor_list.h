// A list of tensors as the kernels see it: a table in device memory, which the host packs into one
// run of bytes. No torch here, and no CUDA.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/layout.h"
#include "common/operands.h"
#include "math/host_device.h"

namespace accumext::cuda {

constexpr int64_t kVectorBytes = 16;  // the widest access of a thread

// Elements of a chunk, the unit of work and the range of one partial sum: a multiple of every
// vector; few enough for 50 million elements to keep all of an H200's 528 resident blocks busy to
// the end, and enough for the partials to be a two-thousandth of the traffic.
constexpr int64_t kElementsPerChunk = 8192;

// A Span, a Pair or a NumberedPair that is not empty. Without padding, because tables are compared
// byte by byte.
template <int kOperands>
struct Entry {
  void* data[kOperands];
  int64_t numel;
  int64_t first_chunk;  // of the list's
  int64_t first_dim;    // of the table's
  int32_t dims;         // 0: every operand is dense, in the same order
  int32_t head;         // elements before the first vector
  Dtype dtype[kOperands];
  int32_t aligned[kOperands];  // whether vectors from `head` on are aligned

  // The first chunk also holds the head, so that all others start with a vector.
  ACCUMEXT_HOST_DEVICE int64_t chunk_end(int64_t chunk) const {
    const int64_t end = head + (chunk - first_chunk + 1) * kElementsPerChunk;
    return end < numel ? end : numel;
  }
  ACCUMEXT_HOST_DEVICE int64_t chunk_begin(int64_t chunk) const {
    return chunk == first_chunk ? 0 : head + (chunk - first_chunk) * kElementsPerChunk;
  }

  // Tells whether the tensor has a chunk, which is not before its first one.
  ACCUMEXT_HOST_DEVICE bool holds(int64_t chunk) const { return chunk_begin(chunk) < numel; }
};
static_assert(std::has_unique_object_representations_v<Entry<1>>);
static_assert(std::has_unique_object_representations_v<Entry<2>>);
static_assert(std::has_unique_object_representations_v<Entry<3>>);

template <int kOperands>
struct Table {
  const Entry<kOperands>* entries;  // [tensors]
  const Dim<kOperands>* dims;
  int32_t tensors;
  int64_t chunks;  // of all tensors together
};

// The bytes of a table: its entries, then the dimensions of those that are not dense.
template <int kOperands>
class Packed {
 public:
  template <typename Operand>  // Span, Pair or NumberedPair
  explicit Packed(const std::vector<Operand>& operands) {
    std::vector<Entry<kOperands>> entries;
    std::vector<Dim<kOperands>> dims;
    entries.reserve(operands.size());
    for (const Operand& operand : operands) {
      if (operand.numel == 0) continue;
      Entry<kOperands> next = entry(operand);
      next.numel = operand.numel;
      next.first_chunk = chunks_;
      next.first_dim = static_cast<int64_t>(dims.size());
      next.dims = static_cast<int32_t>(operand.layout.size());
      if (operand.layout.empty()) align(next);
      const int64_t body = std::max<int64_t>(next.numel - next.head, 1);
      chunks_ += (body + kElementsPerChunk - 1) / kElementsPerChunk;
      entries.push_back(next);
      dims.insert(dims.end(), operand.layout.begin(), operand.layout.end());
    }
    tensors_ = static_cast<int32_t>(entries.size());
    const size_t entry_bytes = entries.size() * sizeof(Entry<kOperands>);
    const size_t dim_bytes = dims.size() * sizeof(Dim<kOperands>);
    bytes_.resize(entry_bytes + dim_bytes);
    if (!entries.empty()) std::memcpy(bytes_.data(), entries.data(), entry_bytes);
    if (!dims.empty()) std::memcpy(bytes_.data() + entry_bytes, dims.data(), dim_bytes);
  }

  const std::vector<std::byte>& bytes() const { return bytes_; }
  int64_t chunks() const { return chunks_; }

  // The table over a copy of the bytes, which is aligned to 8.
  Table<kOperands> at(const std::byte* memory) const {
    return {reinterpret_cast<const Entry<kOperands>*>(memory),
            reinterpret_cast<const Dim<kOperands>*>(memory + tensors_ * sizeof(Entry<kOperands>)),
            tensors_, chunks_};
  }

 private:
  static Entry<1> entry(const Span& span) { return {.data = {span.data}, .dtype = {span.dtype}}; }

  static Entry<2> entry(const Pair& pair) {
    return {.data = {pair.main_grad, const_cast<void*>(pair.grad)},
            .dtype = {pair.main_dtype, pair.grad_dtype}};
  }

  // The third operand has the number of the pair in place of an address; its elements are their own
  // offsets. Its dtype is the widest, so that it does not affect where vectors begin.
  static Entry<3> entry(const NumberedPair& numbered) {
    const Pair& pair = numbered.pair;
    return {.data = {pair.main_grad, const_cast<void*>(pair.grad),
                     reinterpret_cast<void*>(numbered.number)},
            .dtype = {pair.main_dtype, pair.grad_dtype, Dtype::kDouble}};
  }

  // The head aligns the narrowest operand, whose vectors have the most elements, if it aligns
  // operand 0, which is written, as well; otherwise it aligns operand 0 alone.
  static void align(Entry<kOperands>& entry) {
    const auto misalignment = [&](int k, int64_t element) {  // bytes
      const int64_t address = static_cast<int64_t>(reinterpret_cast<intptr_t>(entry.data[k]));
      return (address + element * size_of(entry.dtype[k])) % kVectorBytes;
    };
    const auto head = [&](int k) {
      const int64_t bytes = (kVectorBytes - misalignment(k, 0)) % kVectorBytes;
      return bytes / size_of(entry.dtype[k]);
    };
    int narrowest = 0;
    for (int k = 1; k < kOperands; ++k) {
      if (size_of(entry.dtype[k]) < size_of(entry.dtype[narrowest])) narrowest = k;
    }
    int64_t first = head(narrowest);
    if (misalignment(0, first) != 0) first = head(0);
    for (int k = 0; k < kOperands; ++k) entry.aligned[k] = misalignment(k, first) == 0;
    entry.head = static_cast<int32_t>(std::min(first, entry.numel));
  }

  std::vector<std::byte> bytes_;
  int32_t tensors_ = 0;
  int64_t chunks_ = 0;
};

}  // namespace accumext::cuda
