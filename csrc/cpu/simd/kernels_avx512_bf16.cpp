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

// sum[r][v] += the products of a pair of terms of each row, as pair_of(row) reads it, and a pair of
// each of kVectors * 16 columns.
template <int kRows, int kVectors, typename PairOf>
[[gnu::always_inline]] inline void advance(Vector<float, 16> (&sum)[kRows][kVectors],
                                           RowPointers<kRows, uint16_t>& left,
                                           const uint32_t*& panel, int64_t ld,
                                           const PairOf& pair_of) {
  __m512bh right[kVectors];
  for (int v = 0; v < kVectors; ++v) right[v] = (__m512bh)_mm512_loadu_si512(panel + v * 16);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const __m512bh x = (__m512bh)_mm512_set1_epi32(pair_of(left[r]));
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, right[v]);
  }
  left.advance(2);
  panel += ld;
}

// All pairs of `depth` terms; ahead(pairs) is called every `kLine` of them, a cache line of a row.
template <int kRows, int kVectors, typename Ahead>
[[gnu::always_inline]] inline void advance_all(Vector<float, 16> (&sum)[kRows][kVectors],
                                               const uint16_t* first, int64_t stride,
                                               const uint32_t* panel, int64_t ld, int64_t depth,
                                               const Ahead& ahead) {
  constexpr int kLine = 16;
  const auto both = [](const uint16_t* x) { return raw<int32_t>(x); };
  RowPointers<kRows, uint16_t> left(first, stride);
  const int64_t pairs = depth / 2;
  int64_t pair = 0;
  for (; pair + kLine <= pairs; pair += kLine) {
    ahead();
#pragma GCC unroll 4
    for (int i = 0; i < kLine; ++i) advance<kRows, kVectors>(sum, left, panel, ld, both);
  }
  for (; pair < pairs; ++pair) advance<kRows, kVectors>(sum, left, panel, ld, both);
  if (depth % 2 == 0) return;
  advance<kRows, kVectors>(sum, left, panel, ld,
                           [](const uint16_t* x) { return static_cast<int32_t>(*x); });
}

// kRows rows from `row`, kVectors * 16 columns from `column`.
template <int kVectors, int kRows>
[[gnu::always_inline]] inline void paired_block(const Product<float>& p, int64_t row,
                                                int64_t column) {
  const auto* weight = static_cast<const uint16_t*>(p.weight) + row * p.stride;
  Vector<float, 16> sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    const float bias = p.bias != nullptr ? p.bias[row + r] : 0.0f;
    for (int v = 0; v < kVectors; ++v) sum[r][v] = splat<float, 16>(bias);
  }
  RowPointers<kRows, uint16_t> next(weight + kRows * p.stride, p.stride);
  advance_all<kRows, kVectors>(sum, weight, p.stride,
                               static_cast<const uint32_t*>(p.panel) + column,
                               up_to(kTile, p.columns), p.depth, [&] {
                                 for (int r = 0; r < kRows; ++r) __builtin_prefetch(next[r]);
                                 next.advance(32);
                               });
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

// kRows rows of a block from `row`, kVectors * 16 columns.
template <int kRows, int kVectors>
[[gnu::always_inline]] inline void paired_tile(const Block<float>& b, int64_t row) {
  const auto* left = static_cast<const uint16_t*>(b.left) + row * b.row_stride;
  Vector<float, 16> sum[kRows][kVectors] = {};
  advance_all<kRows, kVectors>(sum, left, b.row_stride, static_cast<const uint32_t*>(b.panel),
                               kPanelColumns<float>, b.depth, [] {});
  put_sums<float, 16>(b, sum, row, 0);
}

template <int kRows>
[[gnu::always_inline]] inline int64_t paired_block_rows(const Block<float>& b, int64_t row) {
  for (; row + kRows <= b.rows; row += kRows) {
    b.columns > 16 ? paired_tile<kRows, 2>(b, row) : paired_tile<kRows, 1>(b, row);
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
