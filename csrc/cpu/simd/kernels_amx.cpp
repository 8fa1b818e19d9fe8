// The products of bfloat16 operands for processors with AMX: tiles of at most 16 rows of the left
// operand by 32 terms, as they lie in memory, times tiles of the panel.
#include "cpu/decoder/kernels.h"

#if defined(ACCUMEXT_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/simd/plain_headers.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16,f16c,fma")
#define ACCUMEXT_VECTOR_BYTES 64
#include "cpu/simd/paired_panels.h"

namespace accumext::cpu {
namespace {

constexpr int64_t kRowBytes = 64;  // of a tile: 16 floats, or 32 terms
constexpr int64_t kTerms = 2 * kTile;

// The shapes of the tiles below. Tiles of sums and of the left operand have only as many rows as
// there are left, so that a row has the same bits in any group of rows.
struct alignas(64) TileShapes {
  explicit TileShapes(int64_t rows_of_both) {
    const auto upper = static_cast<uint8_t>(std::min<int64_t>(rows_of_both, kTile));
    const auto lower = static_cast<uint8_t>(std::max<int64_t>(1, rows_of_both - kTile));
    for (const int tile : {0, 2, 4}) rows[tile] = upper;
    for (const int tile : {1, 3, 5}) rows[tile] = lower;
  }

  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {kRowBytes, kRowBytes, kRowBytes, kRowBytes,
                            kRowBytes, kRowBytes, kRowBytes, kRowBytes};
  uint8_t rows[16] = {0, 0, 0, 0, 0, 0, kTile, kTile};
};

// At most 16 rows of the left operand, a tile of terms at a time. The last terms are copied and
// padded with zeros, because the memory behind them is arbitrary.
class TileRows {
 public:
  TileRows(const uint16_t* first, int64_t stride, int64_t depth, int64_t rows)
      : rows_(std::min<int64_t>(rows, kTile)), first_(first), stride_(stride) {
    const int64_t left = depth % kTerms;
    for (int64_t r = 0; r < (left > 0 ? rows_ : 0); ++r) {
      std::memset(last_[r], 0, kRowBytes);
      std::memcpy(last_[r], first_ + r * stride_ + depth - left, left * sizeof(uint16_t));
    }
  }

  int64_t rows() const { return rows_; }
  const uint16_t* at(int64_t term) const { return first_ + term; }
  int64_t bytes() const { return stride_ * static_cast<int64_t>(sizeof(uint16_t)); }
  const void* last() const { return last_; }
  void prefetch(int64_t term, int64_t rows) const {
    for (int64_t r = 0; r < kTile; ++r) __builtin_prefetch(first_ + (r + rows) * stride_ + term);
  }

 private:
  int64_t rows_;
  const uint16_t* first_;
  int64_t stride_;
  alignas(64) uint16_t last_[kTile][kTerms];
};

// Columns of a paired panel [up_to(kTerms, depth) / 2, columns, 2].
struct TileColumns {
  const char* first;
  int64_t bytes;  // from one pair of terms to the next
  int64_t depth;

  const char* at(int64_t term) const { return first + term / 2 * bytes; }
};

// Tiles of 32 terms of the rows `above` and, if kLower, `below`, times tiles of the panel: 32
// columns if kTwo, otherwise 16.
template <bool kLower, bool kTwo>
[[gnu::always_inline]] inline void advance(const void* above, const void* below, int64_t bytes,
                                           const char* terms, int64_t ld) {
  _tile_loadd(4, above, bytes);
  if constexpr (kLower) _tile_loadd(5, below, bytes);
  _tile_loadd(6, terms, ld);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kLower) _tile_dpbf16ps(1, 5, 6);
  if constexpr (kTwo) {
    _tile_loadd(7, terms + kRowBytes, ld);
    _tile_dpbf16ps(2, 4, 7);
    if constexpr (kLower) _tile_dpbf16ps(3, 5, 7);
  }
}

// Sums of these rows and columns stay in tiles over the whole depth; then put(sums [rows, 16],
// rows, tile of rows, tile of columns) is called. kAhead: rows behind `upper` to prefetch.
template <bool kLower, bool kTwo, int kAhead, typename Put>
[[gnu::always_inline]] inline void tile_block(const TileRows& upper, const TileRows& lower,
                                              const TileColumns& columns, const Put& put) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t term = 0;
  for (; term + kTerms <= columns.depth; term += kTerms) {
    if constexpr (kAhead > 0) {
      upper.prefetch(term, kAhead);
      if constexpr (kLower) lower.prefetch(term, kAhead);
    }
    advance<kLower, kTwo>(upper.at(term), lower.at(term), upper.bytes(), columns.at(term),
                          columns.bytes);
  }
  if (term < columns.depth) {
    advance<kLower, kTwo>(upper.last(), lower.last(), kRowBytes, columns.at(term), columns.bytes);
  }
  alignas(64) float sums[4][kTile * kTile];
  _tile_stored(0, sums[0], kRowBytes);
  if constexpr (kLower) _tile_stored(1, sums[1], kRowBytes);
  if constexpr (kTwo) _tile_stored(2, sums[2], kRowBytes);
  if constexpr (kLower && kTwo) _tile_stored(3, sums[3], kRowBytes);
  for (int64_t across = 0; across < (kTwo ? 2 : 1); ++across) {
    put(sums[2 * across], upper.rows(), 0, across);
    if constexpr (kLower) put(sums[2 * across + 1], lower.rows(), 1, across);
  }
}

// At most 32 rows of the left operand by at most 32 columns.
template <int kAhead, typename Put>
[[gnu::always_inline]] inline void multiply_tiles(const uint16_t* left, int64_t stride,
                                                  int64_t rows, const TileColumns& columns,
                                                  bool two, const Put& put) {
  const TileRows upper(left, stride, columns.depth, rows);
  if (rows <= kTile) {
    two ? tile_block<false, true, kAhead>(upper, upper, columns, put)
        : tile_block<false, false, kAhead>(upper, upper, columns, put);
    return;
  }
  const TileRows lower(left + kTile * stride, stride, columns.depth, rows - kTile);
  two ? tile_block<true, true, kAhead>(upper, lower, columns, put)
      : tile_block<true, false, kAhead>(upper, lower, columns, put);
}

// Calls f(row, count) for at most 32 rows of [begin, end) at a time, with tiles of their shape.
template <typename F>
[[gnu::always_inline]] inline void for_tiles(int64_t begin, int64_t end, const F& f) {
  if (begin == end) return;
  static const TileShapes kWhole(2 * kTile);
  int64_t row = begin;
  if (row + 2 * kTile <= end) _tile_loadconfig(&kWhole);
  for (; row + 2 * kTile <= end; row += 2 * kTile) f(row, 2 * kTile);
  if (row < end) {
    const TileShapes rest(end - row);
    _tile_loadconfig(&rest);
    f(row, end - row);
  }
  _tile_release();
}

void product(const Product<float>& p, int64_t begin, int64_t end) {
  const int64_t ld = up_to(kTile, p.columns) * static_cast<int64_t>(sizeof(uint32_t));
  for_tiles(begin, end, [&](int64_t row, int64_t count) {
    const auto* weight = static_cast<const uint16_t*>(p.weight) + row * p.stride;
    for (int64_t column = 0; column < p.columns; column += 2 * kTile) {
      const TileColumns columns{static_cast<const char*>(p.panel) + column * sizeof(uint32_t), ld,
                                p.depth};
      const auto put = [&](const float* sums, int64_t rows, int64_t down, int64_t across) {
        const int64_t first = row + down * kTile;
        const int64_t at = column + across * kTile;
        for (int64_t r = first; r < first + rows; ++r, sums += kTile) {
          auto sum = raw<Vector<float, kTile>>(sums);
          if (p.bias != nullptr) sum += splat<float, kTile>(p.bias[r]);
          store<float, kTile>(p.out + r * p.out_stride + at, sum, p.columns - at);
        }
      };
      multiply_tiles<2 * kTile>(weight, p.stride, count, columns, column + kTile < p.columns, put);
    }
  });
}

void multiply_pairs(const Block<float>& b) {
  const TileColumns columns{static_cast<const char*>(b.panel),
                            kPanelColumns<float> * static_cast<int64_t>(sizeof(uint32_t)), b.depth};
  for_tiles(0, b.rows, [&](int64_t row, int64_t count) {
    const auto* left = static_cast<const uint16_t*>(b.left) + row * b.row_stride;
    const auto put = [&](const float* sums, int64_t rows, int64_t down, int64_t across) {
      for (int64_t r = 0; r < rows; ++r, sums += kTile) {
        const Vector<float, kTile> sum[1][1] = {{raw<Vector<float, kTile>>(sums)}};
        put_sums<float, kTile>(b, sum, row + down * kTile + r, across * kTile);
      }
    };
    multiply_tiles<0>(left, b.row_stride, count, columns, b.columns > kTile, put);
  });
}

}  // namespace

bool amx_granted() {
  constexpr unsigned kTiles = (1u << 22) | (1u << 24);  // AMX-BF16 and AMX-TILE
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTiles) != kTiles) {
    return false;
  }
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const PairedKernels kPairedAmx = {product, pack_pairs, multiply_pairs, transpose_pairs};

}  // namespace accumext::cpu
#endif
