// The products of bfloat16 operands for processors with AMX: tiles of at most 16 rows of the left
// operand by 32 terms, as they lie in memory, times tiles of the panel.
#include "cpu/decoder/kernels.h"

#if defined(ACCUMEXT_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

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
      : first_(first), stride_(stride) {
    const int64_t left = depth % kTerms;
    for (int64_t r = 0; r < (left > 0 ? std::min<int64_t>(rows, kTile) : 0); ++r) {
      std::memset(last_[r], 0, kRowBytes);
      std::memcpy(last_[r], first_ + r * stride_ + depth - left, left * sizeof(uint16_t));
    }
  }

  const uint16_t* at(int64_t term) const { return first_ + term; }
  int64_t bytes() const { return stride_ * static_cast<int64_t>(sizeof(uint16_t)); }
  const void* last() const { return last_; }

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

// Where the sums of at most 32 rows and 32 columns are read, null: they begin with zeros, and where
// they are written: whole tiles, without a vector between. That would wait for the tile, and so
// would the operands behind it that are still to be read.
struct TileSums {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
};

// The tiles 0 and 1 hold sums of the first columns, 2 and 3 those behind them; 1 and 3 the lower
// rows. Their numbers are constants of the instructions.
template <bool kLower, bool kTwo>
[[gnu::always_inline]] inline void begin_sums(const TileSums& sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (sums.from == nullptr) return;
  const int64_t bytes = sums.from_stride * static_cast<int64_t>(sizeof(float));
  const float* below = sums.from + kTile * sums.from_stride;
  _tile_loadd(0, sums.from, bytes);
  if constexpr (kLower) _tile_loadd(1, below, bytes);
  if constexpr (kTwo) _tile_loadd(2, sums.from + kTile, bytes);
  if constexpr (kLower && kTwo) _tile_loadd(3, below + kTile, bytes);
}

template <bool kLower, bool kTwo>
[[gnu::always_inline]] inline void end_sums(const TileSums& sums) {
  const int64_t bytes = sums.to_stride * static_cast<int64_t>(sizeof(float));
  float* below = sums.to + kTile * sums.to_stride;
  _tile_stored(0, sums.to, bytes);
  if constexpr (kLower) _tile_stored(1, below, bytes);
  if constexpr (kTwo) _tile_stored(2, sums.to + kTile, bytes);
  if constexpr (kLower && kTwo) _tile_stored(3, below + kTile, bytes);
}

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

// Sums of these rows and columns stay in tiles over the whole depth.
template <bool kLower, bool kTwo>
[[gnu::always_inline]] inline void tile_block(const TileRows& upper, const TileRows& lower,
                                              const TileColumns& columns, const TileSums& sums) {
  // What is read from memory was written before: the compiler does not know that tiles read it.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  begin_sums<kLower, kTwo>(sums);
  int64_t term = 0;
  for (; term + kTerms <= columns.depth; term += kTerms) {
    advance<kLower, kTwo>(upper.at(term), lower.at(term), upper.bytes(), columns.at(term),
                          columns.bytes);
  }
  if (term < columns.depth) {
    advance<kLower, kTwo>(upper.last(), lower.last(), kRowBytes, columns.at(term), columns.bytes);
  }
  end_sums<kLower, kTwo>(sums);
}

// At most 32 rows of the left operand by at most 32 columns.
[[gnu::always_inline]] inline void multiply_tiles(const uint16_t* left, int64_t stride,
                                                  int64_t rows, const TileColumns& columns,
                                                  bool two, const TileSums& sums) {
  const TileRows upper(left, stride, columns.depth, rows);
  if (rows <= kTile) {
    two ? tile_block<false, true>(upper, upper, columns, sums)
        : tile_block<false, false>(upper, upper, columns, sums);
    return;
  }
  const TileRows lower(left + kTile * stride, stride, columns.depth, rows - kTile);
  two ? tile_block<true, true>(upper, lower, columns, sums)
      : tile_block<true, false>(upper, lower, columns, sums);
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

// Memory for the sums of whole tiles, 32 rows by 32 columns.
struct alignas(64) WholeTiles {
  static constexpr int64_t kStride = 2 * kTile;
  float sums[2 * kTile][kStride];

  // Calls f(row, column, sums) for every 16 columns.
  template <typename F>
  void each(int64_t rows, int64_t columns, const F& f) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; c += kTile) f(r, c, sums[r] + c);
    }
  }

  // Writes the first `columns` of each row to a matrix that has no whole tiles of them.
  void write(int64_t rows, int64_t columns, float* to, int64_t stride) {
    each(rows, columns, [&](int64_t r, int64_t c, const float* from) {
      store<float, kTile>(to + r * stride + c, raw<Vector<float, kTile>>(from), columns - c);
    });
  }
};

void product(const Product<float>& p, int64_t begin, int64_t end) {
  const int64_t ld = up_to(kTile, p.columns) * static_cast<int64_t>(sizeof(uint32_t));
  WholeTiles bias, rest;
  for_tiles(begin, end, [&](int64_t row, int64_t count) {
    const auto* weight = static_cast<const uint16_t*>(p.weight) + row * p.stride;
    if (p.bias != nullptr) {
      bias.each(count, p.columns > kTile ? 2 * kTile : kTile, [&](int64_t r, int64_t, float* to) {
        store<float, kTile>(to, splat<float, kTile>(p.bias[row + r]), kTile);
      });
    }
    for (int64_t column = 0; column < p.columns; column += 2 * kTile) {
      const TileColumns columns{static_cast<const char*>(p.panel) + column * sizeof(uint32_t), ld,
                                p.depth};
      const int64_t left = std::min(2 * kTile, p.columns - column);
      const bool whole = left % kTile == 0;
      float* out = p.out + row * p.out_stride + column;
      multiply_tiles(weight, p.stride, count, columns, left > kTile,
                     {.from = p.bias != nullptr ? bias.sums[0] : nullptr,
                      .from_stride = WholeTiles::kStride,
                      .to = whole ? out : rest.sums[0],
                      .to_stride = whole ? p.out_stride : WholeTiles::kStride});
      if (!whole) rest.write(count, left, out, p.out_stride);
    }
  });
}

void multiply_pairs(const Block<float>& b) {
  const TileColumns columns{static_cast<const char*>(b.panel),
                            kPanelColumns<float> * static_cast<int64_t>(sizeof(uint32_t)), b.depth};
  const bool whole = b.columns % kTile == 0;
  WholeTiles rest;
  for_tiles(0, b.rows, [&](int64_t row, int64_t count) {
    const auto* left = static_cast<const uint16_t*>(b.left) + row * b.row_stride;
    float* out = b.out + row * b.out_stride;
    float* sums = whole ? out : rest.sums[0];
    const int64_t stride = whole ? b.out_stride : WholeTiles::kStride;
    if (b.add && !whole) {
      rest.each(count, b.columns, [&](int64_t r, int64_t c, float* to) {
        const float* before = out + r * b.out_stride + c;
        store<float, kTile>(to, load_some<float, kTile>(before, b.columns - c), kTile);
      });
    }
    multiply_tiles(left, b.row_stride, count, columns, b.columns > kTile,
                   {b.add ? sums : nullptr, stride, sums, stride});
    if (!whole) rest.write(count, b.columns, out, b.out_stride);
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
