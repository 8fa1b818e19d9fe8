// The inner loops of a large product: tiles of rows times strips of columns. As many sums as the
// registers hold stay there over the panel's depth; a strip of the panel is in the first cache, the
// rows in the second, and both lie in the order in which they are read.
#pragma once

#include "cpu/decoder/kernels.h"
#include "cpu/decoder/skinny_matmul_body.h"

namespace accumext::cpu {
namespace {

// Columns of a strip; a panel is one or several of them, [depth, kStrip] each.
template <typename T>
constexpr int64_t kStrip = 2 * kRegister<T>;

// Terms of a panel: a strip then has 32 or 20 kilobytes. With only 32 in the first cache, there is
// still room for a tile of rows.
constexpr int64_t kPanelTerms = kVectorBytes >= 64 ? 256 : 320;

// Terms that are packed at once, of all rows or columns, if terms are not contiguous: neighbouring
// rows or columns then share cache lines.
constexpr int64_t kTermsAtOnce = 16;

// The first `count` of kSize elements; zeros behind them.
template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> load_some(const T* from, int64_t count) {
  if (count >= kSize) return raw<Vector<T, kSize>>(from);
  Vector<T, kSize> x{};
  if (count > 0) std::memcpy(&x, from, sizeof(T) * count);
  return x;
}

// Writes the sums of kRows rows and kVectors registers of columns to `out`, or adds them to it.
template <typename T, int kSize, int kRows, int kVectors>
[[gnu::always_inline]] inline void put_sums(const Block<T>& b,
                                            const Vector<T, kSize> (&sum)[kRows][kVectors],
                                            int64_t row, int64_t column) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      T* to = b.out + (row + r) * b.out_stride + column + v * kSize;
      const int64_t count = b.columns - column - v * kSize;
      const auto before = b.add ? load_some<T, kSize>(to, count) : Vector<T, kSize>{};
      store<T, kSize>(to, before + sum[r][v], count);
    }
  }
}

// Calls f(first row, height) for tiles of nearly the same height, which is a constant.
template <int kRows, typename F>
[[gnu::always_inline]] inline void with_height(int64_t height, const F& f) {
  if constexpr (kRows > 1) {
    if (height < kRows) return with_height<kRows - 1>(height, f);
  }
  f(std::integral_constant<int, kRows>());
}

template <typename F>
[[gnu::always_inline]] inline void for_each_tile(int64_t rows, const F& f) {
  const int64_t tiles = (rows + kBlockRows - 1) / kBlockRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = rows * i / tiles;
    with_height<kBlockRows>(rows * (i + 1) / tiles - first,
                            [&](auto height) __attribute__((always_inline)) { f(first, height); });
  }
}

template <typename T, int kRows, int kVectors>
void multiply_tile(const Block<T>& b, const T* strip, int64_t row, int64_t column) {
  constexpr int kSize = kRegister<T>;
  const T* left = static_cast<const T*>(b.left) + row * b.depth;
  Vector<T, kSize> sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Vector<T, kSize>{};
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < b.depth; ++k, left += kRows, strip += kStrip<T>) {
    Vector<T, kSize> right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = raw<Vector<T, kSize>>(strip + v * kSize);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector<T, kSize> x = splat<T, kSize>(left[r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = multiply_add<T, kSize>(x, right[v], sum[r][v]);
      }
    }
  }
  put_sums<T, kSize>(b, sum, row, column);
}

template <typename T>
void multiply(const Block<T>& b) {
  for (int64_t column = 0; column < b.columns; column += kStrip<T>) {
    const T* strip = static_cast<const T*>(b.panel) + column * b.depth;
    for_each_tile(b.rows, [&](int64_t row, auto height) __attribute__((always_inline)) {
      b.columns - column > kRegister<T> ? multiply_tile<T, height, 2>(b, strip, row, column)
                                        : multiply_tile<T, height, 1>(b, strip, row, column);
    });
  }
}

// to(row, column)[...] = from(column, row), in squares of 4 by 4, as many as fit; the caller does
// the remaining elements.
template <typename T, typename scalar_t>
[[gnu::always_inline]] inline void transpose_4x4(const scalar_t* from, int64_t from_stride, T* to,
                                                 int64_t to_stride) {
  using V = Vector<T, 4>;
  V column[4];
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) column[c] = load<T, 4, scalar_t>(from + c * from_stride);
  const V a = picked<0, 4, 1, 5, T>(column[0], column[1]);
  const V b = picked<2, 6, 3, 7, T>(column[0], column[1]);
  const V c = picked<0, 4, 1, 5, T>(column[2], column[3]);
  const V d = picked<2, 6, 3, 7, T>(column[2], column[3]);
  const V rows[4] = {picked<0, 1, 4, 5, T>(a, c), picked<2, 3, 6, 7, T>(a, c),
                     picked<0, 1, 4, 5, T>(b, d), picked<2, 3, 6, 7, T>(b, d)};
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) std::memcpy(to + r * to_stride, &rows[r], sizeof(V));
}

// The terms [begin, end) of a tile of kRows rows to `to`, [depth, kRows].
template <typename T, int kRows, typename scalar_t>
void pack_tile(const RowSource& source, const scalar_t* from, int64_t begin, int64_t end, T* to) {
  const int64_t row_stride = source.row_stride;
  const int64_t depth_stride = source.depth_stride;
  int64_t k = begin;
  if constexpr (kRows >= 4) {
    for (; depth_stride == 1 && k + 4 <= end; k += 4) {  // the last square may overlap
      for (int r = 0; r < kRows; r += 4) {
        const int first = std::min(r, kRows - 4);
        __builtin_prefetch(from + (kRows + first) * row_stride + k);
        transpose_4x4(from + first * row_stride + k, row_stride, to + k * kRows + first, kRows);
      }
    }
  }
  for (; k < end; ++k) {
    const scalar_t* at = from + k * depth_stride;
    __builtin_prefetch(at + kTermsAtOnce * depth_stride);
    if (row_stride == 1 && std::is_same_v<T, scalar_t>) {
      std::memcpy(to + k * kRows, at, sizeof(T) * kRows);
      continue;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      to[k * kRows + r] = load<T, 1, scalar_t>(at + r * row_stride)[0];
  }
}

template <typename T, typename scalar_t>
void pack_rows_of(const RowSource& source, T* rows) {
  const int64_t step = source.depth_stride == 1 ? source.depth : kTermsAtOnce;
  const auto* data = static_cast<const scalar_t*>(source.data);
  for (int64_t begin = 0; begin < source.depth; begin += step) {
    const int64_t end = std::min(begin + step, source.depth);
    for_each_tile(source.rows, [&](int64_t row, auto height) __attribute__((always_inline)) {
      pack_tile<T, height>(source, data + row * source.row_stride, begin, end,
                           rows + row * source.depth);
    });
  }
}

// The terms [begin, end) of a strip, whose first column is `first`.
template <typename T, typename scalar_t>
void pack_strip(const PanelSource& source, int64_t first, int64_t begin, int64_t end, T* strip) {
  constexpr int kSize = kRegister<T>;
  const int64_t count = std::min(kStrip<T>, source.columns - first);
  const int64_t stride = source.column_stride;
  const auto* from = static_cast<const scalar_t*>(source.data) + first * stride;
  int64_t k = begin;
  if (source.depth_stride == 1 && count == kStrip<T>) {
    for (; k + 4 <= end; k += 4) {
      for (int64_t i = 0; i < kStrip<T>; i += 4) {
        transpose_4x4(from + i * stride + k, stride, strip + k * kStrip<T> + i, kStrip<T>);
      }
    }
  }
  for (; k < end; ++k) {
    const scalar_t* row = from + k * source.depth_stride;
    T* to = strip + k * kStrip<T>;
    __builtin_prefetch(row + kTermsAtOnce * source.depth_stride);
    if (stride == 1 && count == kStrip<T>) {
      for (int i = 0; i < kStrip<T>; i += kSize) {
        store<T, kSize>(to + i, load<T, kSize, scalar_t>(row + i), kSize);
      }
      continue;
    }
    for (int64_t i = 0; i < kStrip<T>; ++i) {
      to[i] = i < count ? load<T, 1, scalar_t>(row + i * stride)[0] : T(0);
    }
  }
}

template <typename T, typename scalar_t>
void pack_of(const PanelSource& source, T* panels) {
  const int64_t step = source.depth_stride == 1 ? source.depth : kTermsAtOnce;
  for (int64_t begin = 0; begin < source.depth; begin += step) {
    const int64_t end = std::min(begin + step, source.depth);
    for (int64_t first = 0; first < source.columns; first += kStrip<T>) {
      T* panel = panels + first / kPanelColumns<T> * source.panel_size;
      pack_strip<T, scalar_t>(source, first, begin, end,
                              panel + first % kPanelColumns<T> * source.depth);
    }
  }
}

template <typename T>
void pack(const PanelSource& source, T* panel) {
  with_dtype<T>(source.dtype, [&](auto type) { pack_of<T, decltype(type)>(source, panel); });
}

template <typename T>
void pack_rows(const RowSource& source, T* rows) {
  with_dtype<T>(source.dtype, [&](auto type) { pack_rows_of<T, decltype(type)>(source, rows); });
}

}  // namespace
}  // namespace accumext::cpu
