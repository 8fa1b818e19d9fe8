// The skinny product of bfloat16 operands for processors with AMX: tiles of 16 rows of the weight
// by 32 terms, as they lie in memory, times tiles of the panel. The memory sets its speed.
#include "cpu/decoder/kernels.h"

#if defined(ACCUMEXT_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/simd/plain_headers.h"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16,f16c,fma")
#define ACCUMEXT_VECTOR_BYTES 64
#include "cpu/decoder/skinny_matmul_body.h"

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

// 16 rows of the weight, a tile of terms at a time. The last terms are copied, with zeros behind
// them: what follows them in memory may be anything.
class TileRows {
 public:
  TileRows(const Product<float>& p, int64_t row)
      : weight_(static_cast<const uint16_t*>(p.weight) + row * p.stride), stride_(p.stride) {
    const int64_t left = p.depth % kTerms;
    for (int64_t r = 0; r < (left > 0 ? kTile : 0); ++r) {
      std::memset(last_[r], 0, kRowBytes);
      std::memcpy(last_[r], weight_ + r * stride_ + p.depth - left, left * sizeof(uint16_t));
    }
  }

  const uint16_t* at(int64_t term) const { return weight_ + term; }
  int64_t bytes() const { return stride_ * static_cast<int64_t>(sizeof(uint16_t)); }
  const void* last() const { return last_; }
  void prefetch(int64_t term, int64_t rows) const {
    for (int64_t r = 0; r < kTile; ++r) __builtin_prefetch(weight_ + (r + rows) * stride_ + term);
  }

 private:
  const uint16_t* weight_;
  int64_t stride_;
  alignas(64) uint16_t last_[kTile][kTerms];
};

// 16 sums of 16 rows, to `out`.
[[gnu::always_inline]] inline void write_sums(const Product<float>& p, const float* sums,
                                              int64_t row, int64_t column) {
  for (int64_t r = 0; r < kTile; ++r) {
    auto sum = raw<Vector<float, kTile>>(sums + r * kTile);
    if (p.bias != nullptr) sum += splat<float, kTile>(p.bias[row + r]);
    store<float, kTile>(p.out + (row + r) * p.out_stride + column, sum, p.columns - column);
  }
}

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

// Sums of 32 rows and, if kTwo, 32 columns, otherwise 16, stay in tiles over the whole depth.
template <bool kTwo>
[[gnu::always_inline]] inline void tile_block(const Product<float>& p, const TileRows& upper,
                                              const TileRows& lower, int64_t row, int64_t column) {
  const int64_t ld = up_to(kTile, p.columns) * static_cast<int64_t>(sizeof(uint32_t));
  const auto* panel = static_cast<const char*>(p.panel) + column * sizeof(uint32_t);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t term = 0;
  for (; term + kTerms <= p.depth; term += kTerms) {
    upper.prefetch(term, 2 * kTile);
    lower.prefetch(term, 2 * kTile);
    advance<kTwo>(upper.at(term), lower.at(term), upper.bytes(), panel + term / 2 * ld, ld);
  }
  if (term < p.depth) {
    advance<kTwo>(upper.last(), lower.last(), kRowBytes, panel + term / 2 * ld, ld);
  }
  alignas(64) float sums[4][kTile * kTile];
  _tile_stored(0, sums[0], kRowBytes);
  _tile_stored(1, sums[1], kRowBytes);
  write_sums(p, sums[0], row, column);
  write_sums(p, sums[1], row + kTile, column);
  if constexpr (kTwo) {
    _tile_stored(2, sums[2], kRowBytes);
    _tile_stored(3, sums[3], kRowBytes);
    write_sums(p, sums[2], row, column + kTile);
    write_sums(p, sums[3], row + kTile, column + kTile);
  }
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

void paired_product_amx(const Product<float>& p, int64_t begin, int64_t end) {
  static constexpr TileShapes kShapes;
  int64_t row = begin;
  if (row + 2 * kTile <= end) _tile_loadconfig(&kShapes);
  for (; row + 2 * kTile <= end; row += 2 * kTile) {
    const TileRows upper(p, row), lower(p, row + kTile);
    int64_t column = 0;
    for (; column + kTile < p.columns; column += 2 * kTile) {
      tile_block<true>(p, upper, lower, row, column);
    }
    if (column < p.columns) tile_block<false>(p, upper, lower, row, column);
  }
  if (row > begin) _tile_release();
  paired_product_avx512(p, row, end);
}

}  // namespace accumext::cpu
#endif
