// A skinny product, weight [V, depth] times a panel of few columns: blocks of rows by columns are
// held in registers over the whole depth, each weight is read once and multiplied from memory, and
// the rows that come next are asked for while these are worked on. On two cores with AVX-512 this
// is what the memory allows at 16 columns, and more than twice as fast as the library's product.
#pragma once

#include "cpu/decoder/kernels.h"
#include "cpu/simd/elementary.h"

namespace accumext::cpu {
namespace {

// `count` leading elements, all but at the right edge.
template <typename T, int kSize>
[[gnu::always_inline]] inline void store(T* to, const Vector<T, kSize>& x, int64_t count) {
  if (count >= kSize) {
    std::memcpy(to, &x, sizeof(x));
  } else if (count > 0) {
    std::memcpy(to, &x, sizeof(T) * count);
  }
}

// kRows rows at a stride, read side by side. Three of them share a pointer, which the compiler is
// kept from deriving from the others: it would hold kRows offsets, in registers that it does not
// have.
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

 private:
  static constexpr int kGroups = (kRows + 2) / 3;

  const E* group_[kGroups];
  int64_t stride_;
};

// sum[r][v] += w[r, k] * panel[k, v], for kSteps values of k.
template <typename T, int kSize, int kVectors, int kRows, int kSteps>
[[gnu::always_inline]] inline void advance(Vector<T, kSize> (&sum)[kRows][kVectors],
                                           RowPointers<kRows, T>& w, const T*& panel, int64_t ld) {
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

// kRows rows from `row`, kVectors * kSize columns from `column`. `w` has them as T.
template <typename T, int kSize, int kVectors, int kRows>
[[gnu::always_inline]] inline void product_block(const Product<T>& p, const T* w, int64_t stride,
                                                 int64_t row, int64_t column) {
  constexpr int kLine = 64 / sizeof(T);
  constexpr int kSteps = 4;
  const int64_t ld = padded(p.columns);
  const int64_t depth = p.depth;
  const T* panel = static_cast<const T*>(p.panel) + column;
  Vector<T, kSize> sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = splat<T, kSize>(p.bias != nullptr ? p.bias[row + r] : T(0));
    }
  }
  RowPointers<kRows, T> rows(w, stride);
  RowPointers<kRows, T> ahead(w + 2 * kRows * stride, stride);
  int64_t k = 0;
  for (; k + kLine <= depth; k += kLine) {
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(ahead[r]);
    ahead.advance(kLine);
    for (int i = 0; i < kLine; i += kSteps) {
      advance<T, kSize, kVectors, kRows, kSteps>(sum, rows, panel, ld);
    }
  }
  for (; k < depth; ++k) advance<T, kSize, kVectors, kRows, 1>(sum, rows, panel, ld);
  for (int r = 0; r < kRows; ++r) {
    T* out = p.out + (row + r) * p.out_stride + column;
    for (int v = 0; v < kVectors; ++v) {
      store<T, kSize>(out + v * kSize, sum[r][v], p.columns - column - v * kSize);
    }
  }
}

// All columns of kRows rows: as many at once as the registers hold, the last ones in halves.
template <typename T, int kRows>
[[gnu::always_inline]] inline void product_rows(const Product<T>& p, const T* w, int64_t stride,
                                                int64_t row) {
  constexpr int kSize = kRegister<T> < kColumnPad ? kRegister<T> : kColumnPad;
  const int64_t columns = padded(p.columns);
  int64_t column = 0;
  if constexpr (kVectorBytes >= 32) {
    constexpr int kWide = 2 * kRegister<T>;
    for (; column + kWide <= columns; column += kWide) {
      product_block<T, kRegister<T>, 2, kRows>(p, w, stride, row, column);
    }
    if constexpr (kRegister<T> > kColumnPad) {
      if (column + kRegister<T> <= columns) {
        product_block<T, kRegister<T>, 1, kRows>(p, w, stride, row, column);
        column += kRegister<T>;
      }
    }
  }
  for (; column < columns; column += kColumnPad) {
    product_block<T, kSize, kColumnPad / kSize, kRows>(p, w, stride, row, column);
  }
}

// Rows of one block: with 32 registers 12, with 16 of them 6; 4 where a column takes several.
constexpr int kBlockRows = kVectorBytes >= 64 ? 12 : kVectorBytes >= 32 ? 6 : 4;

template <typename T, typename scalar_t>
void product_of(const Product<T>& p, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const scalar_t*>(p.weight);
  const auto rows_at = [&](int64_t row, int rows) -> const T* {
    if constexpr (std::is_same_v<scalar_t, T>) {
      return weight + row * p.stride;
    } else {
      for (int r = 0; r < rows; ++r) {
        const scalar_t* from = weight + (row + r) * p.stride;
        for (int64_t k = 0; k < p.depth; ++k) {
          p.scratch[r * p.depth + k] = static_cast<T>(load<T, 1, scalar_t>(from + k)[0]);
        }
      }
      return p.scratch;
    }
  };
  const int64_t stride = std::is_same_v<scalar_t, T> ? p.stride : p.depth;
  int64_t row = begin;
  for (; row + kBlockRows <= end; row += kBlockRows) {
    product_rows<T, kBlockRows>(p, rows_at(row, kBlockRows), stride, row);
  }
  for (; row < end; ++row) product_rows<T, 1>(p, rows_at(row, 1), stride, row);
}

template <typename T>
void product(const Product<T>& p, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<T, float>) {
    if (p.weight_dtype == Dtype::kHalf) {
      return product_of<T, torch::headeronly::Half>(p, begin, end);
    }
    if (p.weight_dtype == Dtype::kBFloat16) {
      return product_of<T, torch::headeronly::BFloat16>(p, begin, end);
    }
  }
  product_of<T, T>(p, begin, end);
}

}  // namespace
}  // namespace accumext::cpu
