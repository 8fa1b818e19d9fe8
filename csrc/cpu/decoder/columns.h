// Columns of a matrix of logits, in the registers of an instruction set.
#pragma once

#include "cpu/decoder/matmul_body.h"

namespace accumext::cpu {
namespace {

// kVectors registers of kSize columns each, `count` columns of which there are; kWhole: all.
template <int kVectorSize, int kVectorCount, bool kIsWhole>
struct Columns {
  static constexpr int kSize = kVectorSize;
  static constexpr int kVectors = kVectorCount;
  static constexpr bool kWhole = kIsWhole;
  int64_t first;
  int64_t count;

  template <typename T>
  [[gnu::always_inline]] Vector<T, kSize> load(const T* row, int v) const {
    if constexpr (kWhole) {
      return raw<Vector<T, kSize>>(row + first + v * kSize);
    } else {
      return load_some<T, kSize>(row + first, count);
    }
  }

  template <typename T, typename V>
  [[gnu::always_inline]] void store(T* row, int v, const V& x) const {
    if constexpr (kWhole) {
      std::memcpy(row + first + v * kSize, &x, sizeof(V));
    } else {
      // The compiler cannot know that count is less than kSize, and would warn.
      std::memcpy(row + first, &x, count < kSize ? sizeof(T) * count : sizeof(V));
    }
  }
};

// Calls f(Columns) until all columns are done: first pairs of registers, whose results fill a cache
// line even if they are of half precision with AVX-512; then whole registers, half a register, and
// the remaining columns.
template <typename T, typename F>
[[gnu::always_inline]] inline void for_columns(int64_t columns, const F& f) {
  constexpr int kSize = kRegister<T>;
  constexpr int kHalf = kSize > kColumnPad ? kSize / 2 : kSize;
  int64_t first = 0;
  for (; first + 2 * kSize <= columns; first += 2 * kSize) {
    f(Columns<kSize, 2, true>{first, 2 * kSize});
  }
  for (; first + kSize <= columns; first += kSize) f(Columns<kSize, 1, true>{first, kSize});
  if constexpr (kHalf < kSize) {
    if (first + kHalf <= columns) {
      f(Columns<kHalf, 1, true>{first, kHalf});
      first += kHalf;
    }
  }
  if (first < columns) f(Columns<kHalf, 1, false>{first, columns - first});
}

}  // namespace
}  // namespace accumext::cpu
