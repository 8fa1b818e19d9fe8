// The products of bfloat16 operands for processors with AMX: tiles of 16 rows of the left operand
// by 32 terms, as they lie in memory, times tiles of the panel.
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

// Tiles as large as they are, all eight of them.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {kRowBytes, kRowBytes, kRowBytes, kRowBytes,
                            kRowBytes, kRowBytes, kRowBytes, kRowBytes};
  uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
};

// 16 rows of the left operand, a tile of terms at a time. The last terms are copied, with zeros
// behind them: what follows them in memory may be anything.
class TileRows {
 public:
  TileRows(const uint16_t* first, int64_t stride, int64_t depth) : first_(first), stride_(stride) {
    const int64_t left = depth % kTerms;
    for (int64_t r = 0; r < (left > 0 ? kTile : 0); ++r) {
      std::memset(last_[r], 0, kRowBytes);
      std::memcpy(last_[r], first_ + r * stride_ + depth - left, left * sizeof(uint16_t));
    }
  }

  const uint16_t* at(int64_t term) const { return first_ + term; }
  int64_t bytes() const { return stride_ * static_cast<int64_t>(sizeof(uint16_t)); }
  const void* last() const { return last_; }
  void prefetch(int64_t term, int64_t rows) const {
    for (int64_t r = 0; r < kTile; ++r) __builtin_prefetch(first_ + (r + rows) * stride_ + term);
  }

 private:
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

// Tiles of 32 terms of 32 rows, `above` and `below`, times those of the panel's columns.
template <bool kTwo>
[[gnu::always_inline]] inline void advance(const void* above, const void* below, int64_t bytes,
                                           const char* terms, int64_t ld) {
  _tile_loadd(4, above, bytes);
  _tile_loadd(5, below, bytes);
  _tile_loadd(6, terms, ld);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (kTwo) {
    _tile_loadd(7, terms + kRowBytes, ld);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Sums of 32 rows and, if kTwo, 32 columns, otherwise 16, stay in tiles over the whole depth; then
// put(sums [16, 16], tile of rows, tile of columns). kAhead: rows behind `upper` that are fetched.
template <bool kTwo, int kAhead, typename Put>
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
      lower.prefetch(term, kAhead);
    }
    advance<kTwo>(upper.at(term), lower.at(term), upper.bytes(), columns.at(term), columns.bytes);
  }
  if (term < columns.depth) {
    advance<kTwo>(upper.last(), lower.last(), kRowBytes, columns.at(term), columns.bytes);
  }
  alignas(64) float sums[4][kTile * kTile];
  _tile_stored(0, sums[0], kRowBytes);
  _tile_stored(1, sums[1], kRowBytes);
  put(sums[0], 0, 0);
  put(sums[1], 1, 0);
  if constexpr (kTwo) {
    _tile_stored(2, sums[2], kRowBytes);
    _tile_stored(3, sums[3], kRowBytes);
    put(sums[2], 0, 1);
    put(sums[3], 1, 1);
  }
}

// 32 rows of the skinny product.
[[gnu::always_inline]] inline void product_rows(const Product<float>& p, int64_t row) {
  const auto* weight = static_cast<const uint16_t*>(p.weight) + row * p.stride;
  const TileRows upper(weight, p.stride, p.depth);
  const TileRows lower(weight + kTile * p.stride, p.stride, p.depth);
  const int64_t ld = up_to(kTile, p.columns) * static_cast<int64_t>(sizeof(uint32_t));
  for (int64_t column = 0; column < p.columns; column += 2 * kTile) {
    const TileColumns columns{static_cast<const char*>(p.panel) + column * sizeof(uint32_t), ld,
                              p.depth};
    const auto put = [&](const float* sums, int64_t down, int64_t across) {
      const int64_t first = row + down * kTile;
      const int64_t at = column + across * kTile;
      for (int64_t r = first; r < first + kTile; ++r, sums += kTile) {
        auto sum = raw<Vector<float, kTile>>(sums);
        if (p.bias != nullptr) sum += splat<float, kTile>(p.bias[r]);
        store<float, kTile>(p.out + r * p.out_stride + at, sum, p.columns - at);
      }
    };
    if (column + kTile < p.columns) {
      tile_block<true, 2 * kTile>(upper, lower, columns, put);
    } else {
      tile_block<false, 2 * kTile>(upper, lower, columns, put);
    }
  }
}

// 32 rows of a block of a large product.
[[gnu::always_inline]] inline void block_rows(const Block<float>& b, int64_t row) {
  const auto* left = static_cast<const uint16_t*>(b.left) + row * b.row_stride;
  const TileRows upper(left, b.row_stride, b.depth);
  const TileRows lower(left + kTile * b.row_stride, b.row_stride, b.depth);
  const TileColumns columns{static_cast<const char*>(b.panel),
                            kPanelColumns<float> * static_cast<int64_t>(sizeof(uint32_t)), b.depth};
  const auto put = [&](const float* sums, int64_t down, int64_t across) {
    Vector<float, kTile> rows[kTile][1];
    std::memcpy(rows, sums, sizeof(rows));
    put_sums<float, kTile>(b, rows, row + down * kTile, across * kTile);
  };
  if (b.columns > kTile) {
    tile_block<true, 0>(upper, lower, columns, put);
  } else {
    tile_block<false, 0>(upper, lower, columns, put);
  }
}

// f(row) for every 32 rows of [begin, end); the first row that is left.
template <typename F>
[[gnu::always_inline]] inline int64_t for_tiles(int64_t begin, int64_t end, const F& f) {
  static constexpr TileShapes kShapes;
  int64_t row = begin;
  if (row + 2 * kTile > end) return row;
  _tile_loadconfig(&kShapes);
  for (; row + 2 * kTile <= end; row += 2 * kTile) f(row);
  _tile_release();
  return row;
}

void product(const Product<float>& p, int64_t begin, int64_t end) {
  const int64_t row = for_tiles(begin, end, [&](int64_t first) { product_rows(p, first); });
  kPairedAvx512.product(p, row, end);
}

void multiply_pairs(const Block<float>& b) {
  const int64_t row = for_tiles(0, b.rows, [&](int64_t first) { block_rows(b, first); });
  if (row == b.rows) return;
  Block<float> rest = b;
  rest.left = static_cast<const uint16_t*>(b.left) + row * b.row_stride;
  rest.rows -= row;
  rest.out += row * b.out_stride;
  kPairedAvx512.multiply(rest);
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
