// A skinny product, weight [V, depth] times a panel of few columns: each weight is read from memory
// once. With more than a handful of columns, the sums of a block of rows and columns stay in
// registers over the whole depth, and the next rows are prefetched. With a handful, rows are read
// one after the other, and their terms are multiplied side by side.
#pragma once

#include "cpu/decoder/kernels.h"
#include "cpu/simd/elementary.h"
#include "cpu/simd/types.h"

namespace accumext::cpu {
namespace {

// Stores the first `count` elements: all of them, unless the vector is at the right edge.
template <typename T, int kSize>
[[gnu::always_inline]] inline void store(T* to, const Vector<T, kSize>& x, int64_t count) {
  if (count >= kSize) {
    std::memcpy(to, &x, sizeof(x));
  } else if (count > 0) {
    std::memcpy(to, &x, sizeof(T) * count);
  }
}

// kRows rows at a stride, read side by side. Three of them share a pointer. The compiler must not
// derive it from the others: it would keep kRows offsets, for which there are not enough registers.
template <int kRows, typename E>
class RowPointers {
 public:
  [[gnu::always_inline]] RowPointers(const E* first, int64_t stride) : stride_(stride) {
    for (int g = 0; g < kGroups; ++g) {
      group_[g] = first + 3 * g * stride;
#if defined(__GNUC__)
      asm("" : "+r"(group_[g]));
#endif
    }
  }

  [[gnu::always_inline]] const E* operator[](int r) const {
    return group_[r / 3] + r % 3 * stride_;
  }

  [[gnu::always_inline]] void advance(int elements) {
    for (int g = 0; g < kGroups; ++g) group_[g] += elements;
  }

  // Nothing to prepare: terms are read in place.
  [[gnu::always_inline]] void take(int64_t) {}

 private:
  static constexpr int kGroups = (kRows + 2) / 3;

  const E* group_[kGroups];
  int64_t stride_;
};

// `count` elements as T.
template <typename T, typename scalar_t>
[[gnu::always_inline]] inline void widen(const scalar_t* from, int64_t count, T* to) {
  constexpr int kSize = kRegister<T>;
  int64_t k = 0;
  for (; k + kSize <= count; k += kSize) {
    store<T, kSize>(to + k, load<T, kSize, scalar_t>(from + k), kSize);
  }
  for (; k < count; ++k) to[k] = load<T, 1, scalar_t>(from + k)[0];
}

// Rows of half precision: a cache line of each is widened at a time, for all columns of the block.
template <typename T, int kRows, typename scalar_t>
class WidenedRows {
 public:
  [[gnu::always_inline]] WidenedRows(const scalar_t* first, int64_t stride)
      : from_(first), stride_(stride) {}

  // The next `count` terms, at most a line.
  [[gnu::always_inline]] void take(int64_t count) {
    for (int r = 0; r < kRows; ++r) widen<T>(from_ + r * stride_, count, line_[r]);
    from_ += count;
    at_ = line_[0];
  }

  [[gnu::always_inline]] const T* operator[](int r) const { return at_ + r * kLine; }

  [[gnu::always_inline]] void advance(int elements) { at_ += elements; }

 private:
  static constexpr int kLine = 64 / sizeof(scalar_t);

  const scalar_t* from_;
  int64_t stride_;
  T line_[kRows][kLine];
  const T* at_;
};

// sum[r][v] += w[r, k] * panel[k, v], for kSteps values of k.
template <typename T, int kSize, int kVectors, int kRows, int kSteps, typename Rows>
[[gnu::always_inline]] inline void advance(Vector<T, kSize> (&sum)[kRows][kVectors], Rows& w,
                                           const T*& panel, int64_t ld) {
#pragma GCC unroll 4
  for (int k = 0; k < kSteps; ++k, panel += ld) {
    Vector<T, kSize> h[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) h[v] = raw<Vector<T, kSize>>(panel + v * kSize);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector<T, kSize> weight = splat<T, kSize>(w[r][k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = multiply_add<T, kSize>(weight, h[v], sum[r][v]);
      }
    }
  }
  w.advance(kSteps);
}

// kRows rows from `row`, kVectors * kSize columns from `column`.
template <typename T, int kSize, int kVectors, int kRows, typename scalar_t>
[[gnu::always_inline]] inline void product_block(const Product<T>& p, int64_t row, int64_t column) {
  constexpr int kLine = 64 / sizeof(scalar_t);
  constexpr int kSteps = 4;
  const auto* w = static_cast<const scalar_t*>(p.weight) + row * p.stride;
  const int64_t ld = padded(p.columns);
  const int64_t depth = p.depth;
  const T* panel = static_cast<const T*>(p.panel) + column;
  Vector<T, kSize> sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = splat<T, kSize>(p.bias != nullptr ? p.bias[row + r] : T(0));
    }
  }
  using Rows = std::conditional_t<std::is_same_v<T, scalar_t>, RowPointers<kRows, T>,
                                  WidenedRows<T, kRows, scalar_t>>;
  Rows rows(w, p.stride);
  RowPointers<kRows, scalar_t> ahead(w + 2 * kRows * p.stride, p.stride);
  int64_t k = 0;
  for (; k + kLine <= depth; k += kLine) {
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(ahead[r]);
    ahead.advance(kLine);
    rows.take(kLine);
    for (int i = 0; i < kLine; i += kSteps) {
      advance<T, kSize, kVectors, kRows, kSteps>(sum, rows, panel, ld);
    }
  }
  rows.take(depth - k);
  for (; k < depth; ++k) advance<T, kSize, kVectors, kRows, 1>(sum, rows, panel, ld);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    T* out = p.out + (row + r) * p.out_stride + column;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      store<T, kSize>(out + v * kSize, sum[r][v], p.columns - column - v * kSize);
    }
  }
}

// All columns of kRows rows: as many at once as the registers hold, the last ones in halves.
template <typename T, int kRows, typename scalar_t>
[[gnu::always_inline]] inline void product_rows(const Product<T>& p, int64_t row) {
  constexpr int kSize = kRegister<T> < kColumnPad ? kRegister<T> : kColumnPad;
  const int64_t columns = padded(p.columns);
  int64_t column = 0;
  if constexpr (kVectorBytes >= 32) {
    constexpr int kWide = 2 * kRegister<T>;
    for (; column + kWide <= columns; column += kWide) {
      product_block<T, kRegister<T>, 2, kRows, scalar_t>(p, row, column);
    }
    if constexpr (kRegister<T> > kColumnPad) {
      if (column + kRegister<T> <= columns) {
        product_block<T, kRegister<T>, 1, kRows, scalar_t>(p, row, column);
        column += kRegister<T>;
      }
    }
  }
  for (; column < columns; column += kColumnPad) {
    product_block<T, kSize, kColumnPad / kSize, kRows, scalar_t>(p, row, column);
  }
}

// Rows of one block: 12 with 32 registers, 6 with 16; 4 if a column takes several registers.
constexpr int kBlockRows = kVectorBytes >= 64 ? 12 : kVectorBytes >= 32 ? 6 : 4;

template <typename T>
[[gnu::always_inline]] inline T sum_of(const Vector<T, kRegister<T>>& x) {
  T parts[kRegister<T>];
  std::memcpy(parts, &x, sizeof(x));
#pragma GCC unroll 4
  for (int half = kRegister<T> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

// Rows [begin, end) of a product of kColumns columns, which the panel has as rows.
template <typename T, int kColumns, typename scalar_t>
void dot_rows(const Product<T>& p, int64_t begin, int64_t end) {
  using V = Vector<T, kRegister<T>>;
  constexpr int kSize = kRegister<T>;
  constexpr int kChains = kColumns == 1 ? 4 : 2;  // of independent sums
  constexpr int kStep = kChains * kSize;
  const auto* panel = static_cast<const T*>(p.panel);
  for (int64_t row = begin; row < end; ++row) {
    const auto* w = static_cast<const scalar_t*>(p.weight) + row * p.stride;
    V sum[kColumns][kChains] = {};
    int64_t k = 0;
    for (; k + kStep <= p.depth; k += kStep) {
      prefetch<kStep, 2048>(w + k);
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const V weights = load<T, kSize, scalar_t>(w + k + c * kSize);
#pragma GCC unroll 4
        for (int i = 0; i < kColumns; ++i) {
          const V h = raw<V>(panel + i * p.depth + k + c * kSize);
          sum[i][c] = multiply_add<T, kSize>(weights, h, sum[i][c]);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kColumns; ++i) {
      V all = sum[i][0];
      for (int c = 1; c < kChains; ++c) all += sum[i][c];
      T total = sum_of<T>(all) + (p.bias != nullptr ? p.bias[row] : T(0));
      for (int64_t j = k; j < p.depth; ++j) {
        total += load<T, 1, scalar_t>(w + j)[0] * panel[i * p.depth + j];
      }
      p.out[row * p.out_stride + i] = total;
    }
  }
}

template <typename T, typename scalar_t>
void product_of(const Product<T>& p, int64_t begin, int64_t end) {
  switch (p.columns) {
    case 1:
      return dot_rows<T, 1, scalar_t>(p, begin, end);
    case 2:
      return dot_rows<T, 2, scalar_t>(p, begin, end);
    case 3:
      return dot_rows<T, 3, scalar_t>(p, begin, end);
    case kDotColumns:
      return dot_rows<T, kDotColumns, scalar_t>(p, begin, end);
    default:
      break;
  }
  int64_t row = begin;
  for (; row + kBlockRows <= end; row += kBlockRows) {
    product_rows<T, kBlockRows, scalar_t>(p, row);
  }
  for (; row < end; ++row) product_rows<T, 1, scalar_t>(p, row);
}

template <typename T>
void read(Dtype dtype, const void* from, int64_t count, T* to) {
  with_type(dtype,
            [&](auto type) { widen<T>(static_cast<const decltype(type)*>(from), count, to); });
}

// f(a value of this dtype).
template <typename T, typename F>
[[gnu::always_inline]] inline void with_dtype(Dtype dtype, const F& f) {
  if constexpr (std::is_same_v<T, float>) {
    if (dtype == Dtype::kHalf) return f(torch::headeronly::Half());
    if (dtype == Dtype::kBFloat16) return f(torch::headeronly::BFloat16());
  }
  f(T());
}

template <typename T>
void product(const Product<T>& p, int64_t begin, int64_t end) {
  with_dtype<T>(p.weight_dtype, [&](auto type) { product_of<T, decltype(type)>(p, begin, end); });
}

}  // namespace
}  // namespace accumext::cpu
