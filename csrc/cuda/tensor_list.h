// A list of tensors as the kernels see it: a table that the host packs into one run of bytes. No
// torch here, and no CUDA.
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
  int32_t first_dim;    // of the table's
  int16_t dims;         // 0: every operand is dense, in the same order
  int16_t head;         // elements before the first vector
  Dtype dtype[kOperands];
  int32_t aligned[kOperands];  // whether vectors from `head` on are aligned: of operand 0, always

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

// A table as an argument of a kernel: with its bytes, if they are no more than kBytes, or with
// where they are in device memory. They are its entries, then the dimensions of those that are not
// dense.
template <int kOperands, size_t kBytes>
struct Table {
  const std::byte* uploaded;  // null: the bytes are those that are held
  int64_t chunks;             // of all tensors together
  int32_t tensors;
  alignas(Entry<kOperands>) std::byte held[kBytes];

  ACCUMEXT_HOST_DEVICE const std::byte* bytes() const {
    return uploaded != nullptr ? uploaded : held;
  }
  ACCUMEXT_HOST_DEVICE const Entry<kOperands>& entry(int tensor) const {
    return reinterpret_cast<const Entry<kOperands>*>(bytes())[tensor];
  }
  ACCUMEXT_HOST_DEVICE const Dim<kOperands>& dim(int64_t dim) const {
    const std::byte* const dims = bytes() + tensors * sizeof(Entry<kOperands>);
    return reinterpret_cast<const Dim<kOperands>*>(dims)[dim];
  }
};

// The bytes of a table.
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
      next.first_dim = static_cast<int32_t>(dims.size());
      next.dims = static_cast<int16_t>(operand.layout.size());
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

  // The table with its bytes at `uploaded`; if that is null, it holds them itself.
  template <size_t kBytes>
  Table<kOperands, kBytes> table(const std::byte* uploaded) const {
    Table<kOperands, kBytes> table;
    table.uploaded = uploaded;
    table.chunks = chunks_;
    table.tensors = tensors_;
    if (uploaded == nullptr) std::ranges::copy(bytes_, table.held);
    return table;
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
  // operand 0, which is written, as well; otherwise it aligns operand 0 alone, and the other is
  // read element by element.
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
    entry.head = static_cast<int16_t>(std::min(first, entry.numel));
  }

  std::vector<std::byte> bytes_;
  int32_t tensors_ = 0;
  int64_t chunks_ = 0;
};

}  // namespace accumext::cuda
