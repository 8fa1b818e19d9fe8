// The products of bfloat16 operands for processors with AVX512-BF16: two terms at a time, their
// sums in float.
#include "cpu/decoder/kernels.h"

#if defined(__x86_64__)
#include "cpu/simd/plain_headers.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma")
#define ACCUMEXT_VECTOR_BYTES 64
#include "cpu/simd/paired_panels.h"

namespace accumext::cpu {
namespace {

// kRows rows from `row`, kVectors * 16 columns from `column`.
template <int kVectors, int kRows>
[[gnu::always_inline]] inline void paired_block(const Product<float>& p, int64_t row,
                                                int64_t column) {
  constexpr int kLine = 16;  // pairs in a cache line
  const auto* weight = static_cast<const uint16_t*>(p.weight) + row * p.stride;
  const int64_t ld = up_to(kTile, p.columns);
  const auto* panel = static_cast<const uint32_t*>(p.panel) + column;
  __m512 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    const float bias = p.bias != nullptr ? p.bias[row + r] : 0.0f;
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_set1_ps(bias);
  }
  const auto advance = [&](int64_t pair, auto pair_of) __attribute__((always_inline)) {
    __m512bh h[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      h[v] = (__m512bh)_mm512_loadu_si512(panel + pair * ld + v * 16);
    }
    for (int r = 0; r < kRows; ++r) {
      const __m512bh w = (__m512bh)_mm512_set1_epi32(pair_of(weight + r * p.stride + 2 * pair));
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], w, h[v]);
    }
  };
  const auto both = [](const uint16_t* w) { return raw<int32_t>(w); };
  const auto last = [](const uint16_t* w) { return static_cast<int32_t>(*w); };
  const int64_t pairs = p.depth / 2;
  int64_t pair = 0;
  for (; pair + kLine <= pairs; pair += kLine) {
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(weight + (r + kRows) * p.stride + 2 * pair);
#pragma GCC unroll 4
    for (int i = 0; i < kLine; ++i) advance(pair + i, both);
  }
  for (; pair < pairs; ++pair) advance(pair, both);
  if (p.depth % 2 != 0) advance(pairs, last);
  for (int r = 0; r < kRows; ++r) {
    float* out = p.out + (row + r) * p.out_stride + column;
    for (int v = 0; v < kVectors; ++v) {
      store<float, 16>(out + v * 16, sum[r][v], p.columns - column - v * 16);
    }
  }
}

template <int kRows>
[[gnu::always_inline]] inline void paired_rows(const Product<float>& p, int64_t row) {
  int64_t column = 0;
  for (; column + 16 < p.columns; column += 32) paired_block<2, kRows>(p, row, column);
  if (column < p.columns) paired_block<1, kRows>(p, row, column);
}

void product(const Product<float>& p, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + kRowBlock <= end; row += kRowBlock) paired_rows<kRowBlock>(p, row);
  for (; row < end; ++row) paired_rows<1>(p, row);
}

// kRows rows of a block from `row`, kVectors * 16 columns from `column`.
template <int kRows, int kVectors>
[[gnu::always_inline]] inline void paired_tile(const Block<float>& b, int64_t row, int64_t column) {
  const auto* left = static_cast<const uint16_t*>(b.left) + row * b.row_stride;
  const auto* panel = static_cast<const uint32_t*>(b.panel) + column;
  Vector<float, 16> sum[kRows][kVectors] = {};
  const auto advance = [&](int64_t pair, auto pair_of) __attribute__((always_inline)) {
    __m512bh right[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      right[v] = (__m512bh)_mm512_loadu_si512(panel + pair * kPanelColumns<float> + v * 16);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair_of(left + r * b.row_stride + 2 * pair));
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, right[v]);
    }
  };
  const int64_t pairs = b.depth / 2;
#pragma GCC unroll 4
  for (int64_t pair = 0; pair < pairs; ++pair) {
    advance(pair, [](const uint16_t* x) { return raw<int32_t>(x); });
  }
  if (b.depth % 2 != 0) {
    advance(pairs, [](const uint16_t* x) { return static_cast<int32_t>(*x); });
  }
  put_sums<float, 16>(b, sum, row, column);
}

template <int kRows>
[[gnu::always_inline]] inline int64_t paired_block_rows(const Block<float>& b, int64_t row) {
  for (; row + kRows <= b.rows; row += kRows) {
    b.columns > 16 ? paired_tile<kRows, 2>(b, row, 0) : paired_tile<kRows, 1>(b, row, 0);
  }
  return row;
}

void multiply_pairs(const Block<float>& b) {
  int64_t row = paired_block_rows<kRowBlock>(b, 0);
  row = paired_block_rows<4>(b, row);
  paired_block_rows<1>(b, row);
}

}  // namespace

const PairedKernels kPairedAvx512 = {product, pack_pairs, multiply_pairs, transpose_pairs};

}  // namespace accumext::cpu
#endif
