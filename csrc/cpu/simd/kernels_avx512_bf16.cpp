// The skinny product of bfloat16 operands for processors with AVX512-BF16: two terms at a time,
// their sums in float.
#include "cpu/decoder/kernels.h"

#if defined(__x86_64__)
#include "cpu/simd/plain_headers.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma")
#define ACCUMEXT_VECTOR_BYTES 64
#include "cpu/decoder/skinny_matmul_body.h"

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

}  // namespace

void paired_product_avx512(const Product<float>& p, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + kRowBlock <= end; row += kRowBlock) paired_rows<kRowBlock>(p, row);
  for (; row < end; ++row) paired_rows<1>(p, row);
}

}  // namespace accumext::cpu
#endif
