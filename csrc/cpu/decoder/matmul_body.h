// The inner loops of a large product: rows of the left operand times a panel of the right one. As
// many sums as the registers hold stay there over the panel's depth; the panel is in the first
// cache, the rows in the second.
#pragma once

#include "cpu/decoder/kernels.h"
#include "cpu/decoder/skinny_matmul_body.h"

namespace accumext::cpu {
namespace {

// The first `count` of kSize elements; zeros behind them.
template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> load_some(const T* from, int64_t count) {
  if (count >= kSize) return raw<Vector<T, kSize>>(from);
  Vector<T, kSize> x{};
  if (count > 0) std::memcpy(&x, from, sizeof(T) * count);
  return x;
}

// Sums of kRows rows and kVectors registers of columns to `out`, or added to what is there.
template <typename T, int kSize, int kRows, int kVectors>
[[gnu::always_inline]] inline void put_sums(const Block<T>& b,
                                            const Vector<T, kSize> (&sum)[kRows][kVectors],
                                            int64_t row, int64_t column) {
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      T* to = b.out + (row + r) * b.out_stride + column + v * kSize;
      const int64_t count = b.columns - column - v * kSize;
      const auto before = b.add ? load_some<T, kSize>(to, count) : Vector<T, kSize>{};
      store<T, kSize>(to, before + sum[r][v], count);
    }
  }
}

// The left operand at a term of kRows rows: side by side, or each at a stride.
template <typename T, bool kRowMajor, int kRows>
class LeftRows;

template <typename T, int kRows>
class LeftRows<T, true, kRows> {
 public:
  LeftRows(const Block<T>& b, int64_t row)
      : rows_(static_cast<const T*>(b.left) + row * b.row_stride, b.row_stride) {}
  [[gnu::always_inline]] T operator[](int r) const { return *rows_[r]; }
  [[gnu::always_inline]] void advance() { rows_.advance(1); }

 private:
  RowPointers<kRows, T> rows_;
};

template <typename T, int kRows>
class LeftRows<T, false, kRows> {
 public:
  LeftRows(const Block<T>& b, int64_t row)
      : first_(static_cast<const T*>(b.left) + row), stride_(b.depth_stride) {}
  [[gnu::always_inline]] T operator[](int r) const { return first_[r]; }
  [[gnu::always_inline]] void advance() { first_ += stride_; }

 private:
  const T* first_;
  int64_t stride_;
};

template <typename T, bool kRowMajor, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply_tile(const Block<T>& b, int64_t row, int64_t column) {
  constexpr int kSize = kRegister<T>;
  LeftRows<T, kRowMajor, kRows> left(b, row);
  const T* panel = static_cast<const T*>(b.panel) + column;
  Vector<T, kSize> sum[kRows][kVectors] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < b.depth; ++k, panel += kPanelColumns<T>) {
    Vector<T, kSize> right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = raw<Vector<T, kSize>>(panel + v * kSize);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector<T, kSize> x = splat<T, kSize>(left[r]);
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = multiply_add<T, kSize>(x, right[v], sum[r][v]);
      }
    }
    left.advance();
  }
  put_sums<T, kSize>(b, sum, row, column);
}

// Rows from `row` on, kRows at a time, while that many are left of the first `rows`. Where it ends.
template <typename T, bool kRowMajor, int kRows>
[[gnu::always_inline]] inline int64_t multiply_rows(const Block<T>& b, int64_t row, int64_t rows) {
  constexpr int kSize = kRegister<T>;
  for (; row + kRows <= rows; row += kRows) {
    int64_t column = 0;
    for (; column + kSize < b.columns; column += 2 * kSize) {
      multiply_tile<T, kRowMajor, kRows, 2>(b, row, column);
    }
    if (column < b.columns) multiply_tile<T, kRowMajor, kRows, 1>(b, row, column);
  }
  return row;
}

template <typename T, bool kRowMajor>
void multiply_block(const Block<T>& b) {
  int64_t row = 0;
  if constexpr (kBlockRows > 8) {
    // 16 rows are twice 8 rather than 12 and 4, whose sums would wait for one another.
    const bool halves = b.rows % kBlockRows == 4 && b.rows > 4;
    row = multiply_rows<T, kRowMajor, kBlockRows>(b, 0, b.rows - (halves ? kBlockRows : 0));
    row = multiply_rows<T, kRowMajor, 8>(b, row, b.rows);
  }
  if constexpr (kBlockRows > 4) row = multiply_rows<T, kRowMajor, 4>(b, row, b.rows);
  multiply_rows<T, kRowMajor, 1>(b, row, b.rows);
}

template <typename T>
void multiply(const Block<T>& b) {
  b.depth_stride == 1 ? multiply_block<T, true>(b) : multiply_block<T, false>(b);
}

// A panel of which the terms of a column lie next to each other: transposed by squares of 4 by 4.
template <typename T, typename scalar_t>
void pack_transposed(const PanelSource& source, T* panel) {
  using V = Vector<T, 4>;
  const auto* data = static_cast<const scalar_t*>(source.data);
  const auto at = [&](int64_t k, int64_t i) { return data + i * source.column_stride + k; };
  const int64_t depth = source.depth & -4;
  const int64_t columns = source.columns & -4;
  for (int64_t k = 0; k < depth; k += 4) {
    T* to = panel + k * kPanelColumns<T>;
    for (int64_t i = 0; i < columns; i += 4) {
      V column[4];
      for (int c = 0; c < 4; ++c) column[c] = load<T, 4, scalar_t>(at(k, i + c));
      for (int r = 0; r < 4; ++r) {
        const V row = {column[0][r], column[1][r], column[2][r], column[3][r]};
        std::memcpy(to + r * kPanelColumns<T> + i, &row, sizeof(row));
      }
    }
  }
  for (int64_t k = 0; k < source.depth; ++k) {
    T* to = panel + k * kPanelColumns<T>;
    for (int64_t i = k < depth ? columns : 0; i < source.columns; ++i) {
      to[i] = load<T, 1, scalar_t>(at(k, i))[0];
    }
    std::fill(to + source.columns, to + kPanelColumns<T>, T(0));
  }
}

template <typename T, typename scalar_t>
void pack_of(const PanelSource& source, T* panel) {
  if (source.depth_stride == 1 && source.column_stride != 1) {
    return pack_transposed<T, scalar_t>(source, panel);
  }
  constexpr int kSize = kRegister<T>;
  const auto* from = static_cast<const scalar_t*>(source.data);
  const bool whole = source.column_stride == 1 && source.columns == kPanelColumns<T>;
  for (int64_t k = 0; k < source.depth; ++k, from += source.depth_stride) {
    T* to = panel + k * kPanelColumns<T>;
    if (whole) {
      for (int i = 0; i < kPanelColumns<T>; i += kSize) {
        store<T, kSize>(to + i, load<T, kSize, scalar_t>(from + i), kSize);
      }
      continue;
    }
    for (int64_t i = 0; i < source.columns; ++i) {
      to[i] = load<T, 1, scalar_t>(from + i * source.column_stride)[0];
    }
    std::fill(to + source.columns, to + kPanelColumns<T>, T(0));
  }
}

template <typename T>
void pack(const PanelSource& source, T* panel) {
  if constexpr (std::is_same_v<T, float>) {
    if (source.dtype == Dtype::kHalf) return pack_of<T, torch::headeronly::Half>(source, panel);
    if (source.dtype == Dtype::kBFloat16) {
      return pack_of<T, torch::headeronly::BFloat16>(source, panel);
    }
  }
  pack_of<T, T>(source, panel);
}

}  // namespace
}  // namespace accumext::cpu
