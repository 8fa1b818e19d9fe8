// Operands of bfloat16 products in the layout of their kernels, for processors with AVX-512: pairs
// of terms next to each other.
#pragma once

#include "cpu/decoder/matmul_body.h"

namespace accumext::cpu {
namespace {

// 16 pairs of the terms of two rows, `second` null: of one.
[[gnu::always_inline]] inline __m512i pairs_of(const uint16_t* first, const uint16_t* second,
                                               int64_t count) {
  const __mmask16 mask = count >= 16 ? 0xffff : (1u << count) - 1;
  const auto wide = [&](const uint16_t* row) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row));
  };
  const __m512i low = wide(first);
  return second == nullptr ? low : _mm512_or_si512(low, _mm512_slli_epi32(wide(second), 16));
}

// rows[i][j] becomes rows[j][i].
[[gnu::always_inline]] inline void transpose_16x16(__m512i (&rows)[16]) {
  __m512i next[16];
  for (int i = 0; i < 16; i += 2) {
    next[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    next[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(next[i], next[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(next[i], next[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(next[i + 1], next[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(next[i + 1], next[i + 3]);
  }
  // Now in squares of 4 x 4 within each quarter of a register; then the quarters.
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    next[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    next[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    next[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    next[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; ++i) rows[i] = next[i];
}

inline void transpose_pairs(const uint16_t* from, int64_t from_stride, int64_t depth, int64_t rows,
                            uint16_t* to, int64_t stride) {
  for (int64_t row = 0; row < rows; row += 16) {
    const int64_t count = std::min<int64_t>(16, rows - row);
    for (int64_t k = 0; k < stride; k += 32) {
      __m512i pairs[16];
      for (int i = 0; i < 16; ++i) {
        const uint16_t* first = from + (k + 2 * i) * from_stride + row;
        const int64_t left = depth - k - 2 * i;
        pairs[i] = left <= 0 ? _mm512_setzero_si512()
                             : pairs_of(first, left > 1 ? first + from_stride : nullptr, count);
      }
      transpose_16x16(pairs);
      for (int64_t i = 0; i < count; ++i) {
        _mm512_storeu_si512(to + (row + i) * stride + k, pairs[i]);
      }
    }
  }
}

// Terms of a panel's column as bits of bfloat16.
template <typename scalar_t>
[[gnu::always_inline]] inline uint32_t term(const scalar_t& x) {
  if constexpr (is_bfloat16<scalar_t>) {
    return x.x;
  } else {
    return bfloat16_bits<4>(Vector<float, 4>{static_cast<float>(x)})[0];
  }
}

// A panel, whose first column is `first`.
template <typename scalar_t>
void pack_pairs_of(const PanelSource& source, int64_t first, uint32_t* panel) {
  constexpr int64_t kColumns = kPanelColumns<float>;
  const auto* from = static_cast<const scalar_t*>(source.data) + first * source.column_stride;
  const int64_t columns = std::min(kColumns, source.columns - first);
  const bool whole = source.column_stride == 1 && columns == kColumns;
  for (int64_t k = 0; k < source.depth; k += 2, from += 2 * source.depth_stride) {
    uint32_t* to = panel + k / 2 * kColumns;
    const scalar_t* second = k + 1 < source.depth ? from + source.depth_stride : nullptr;
    if (whole && !is_half<scalar_t>) {
      for (int i = 0; i < kColumns; i += 16) {
        const auto wide = [&](const scalar_t* row) -> Vector<uint32_t, 16> {
          if constexpr (is_bfloat16<scalar_t>) {
            return load_uint16<16>(row + i);
          } else {
            return converted<uint32_t, 16, uint16_t>(
                bfloat16_bits<16>(load<float, 16, scalar_t>(row + i)));
          }
        };
        Vector<uint32_t, 16> pairs = wide(from);
        if (second != nullptr) pairs |= wide(second) << 16;
        std::memcpy(to + i, &pairs, sizeof(pairs));
      }
      continue;
    }
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t at = i * source.column_stride;
      to[i] = term(from[at]) | (second != nullptr ? term(second[at]) << 16 : 0);
    }
    std::fill(to + columns, to + kColumns, 0);
  }
  const int64_t pairs = (source.depth + 1) / 2;
  std::fill(panel + pairs * kColumns, panel + up_to(kTile, pairs) * kColumns, 0);
}

inline void pack_pairs(const PanelSource& source, uint32_t* panels) {
  for (int64_t first = 0; first < source.columns; first += kPanelColumns<float>) {
    uint32_t* panel = panels + first / kPanelColumns<float> * source.panel_size;
    with_dtype<float>(source.dtype,
                      [&](auto type) { pack_pairs_of<decltype(type)>(source, first, panel); });
  }
}

}  // namespace
}  // namespace accumext::cpu
