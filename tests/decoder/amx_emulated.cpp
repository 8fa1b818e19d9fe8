// The products for AMX with its tiles emulated, against their definition: processors that have
// AVX512-BF16 but no AMX run them, too. Exit status 1 if one is wrong.
#include "cpu/simd/plain_headers.h"
//
#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace emulated {

struct Tile {
  uint8_t bytes[16][64];
};
inline Tile tiles[8];
inline int rows[8];  // of each tile, as they are set
inline bool configured = false;

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

inline Tile& tile(int index) {
  require(configured, "a tile is used before its shape is set");
  return tiles[index];
}

inline void configure(const void* shapes) {
  const auto* bytes = static_cast<const uint8_t*>(shapes);
  require(bytes[0] == 1, "palette");
  for (int t = 0; t < 8; ++t) {
    require(bytes[16 + 2 * t] == 64 && bytes[17 + 2 * t] == 0, "bytes of a row");
    rows[t] = bytes[48 + t];
    require(1 <= rows[t] && rows[t] <= 16, "rows");
  }
  configured = true;
}

inline void load(int index, const void* from, int64_t stride) {
  for (int r = 0; r < rows[index]; ++r) {
    std::memcpy(tile(index).bytes[r], static_cast<const char*>(from) + r * stride, 64);
  }
}

inline void store(int index, void* to, int64_t stride) {
  for (int r = 0; r < rows[index]; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, tile(index).bytes[r], 64);
  }
}

inline void multiply(int sums, int left, int right) {
  const auto term = [](const Tile& tile, int row, int at) {
    uint16_t x;
    std::memcpy(&x, tile.bytes[row] + 2 * at, sizeof(x));
    const uint32_t wide = uint32_t{x} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  };
  require(rows[sums] == rows[left] && rows[right] == 16, "shapes of a product");
  for (int m = 0; m < rows[sums]; ++m) {
    for (int n = 0; n < 16; ++n) {
      float sum;
      std::memcpy(&sum, tile(sums).bytes[m] + 4 * n, sizeof(sum));
      for (int k = 0; k < 32; ++k) {
        sum += term(tile(left), m, k) * term(tile(right), k / 2, 2 * n + k % 2);
      }
      std::memcpy(tile(sums).bytes[m] + 4 * n, &sum, sizeof(sum));
    }
  }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) emulated::configure(shapes)
#define _tile_release() (emulated::configured = false)
#define _tile_zero(index) std::memset(&emulated::tile(index), 0, sizeof(emulated::Tile))
#define _tile_loadd(index, from, stride) emulated::load(index, from, stride)
#define _tile_stored(index, to, stride) emulated::store(index, to, stride)
#define _tile_dpbf16ps(sums, left, right) emulated::multiply(sums, left, right)
#include "cpu/simd/kernels_amx.cpp"

namespace {

using namespace accumext::cpu;

constexpr uint16_t kNan = 0x7fc0;  // whatever is read beside an operand
constexpr float kUntouched = 7.0f;

uint16_t top_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits >> 16;
}

// Multiples of 1/8 up to 2 in magnitude: sums of them are exact in any order.
uint16_t some(int64_t i) {
  return top_half(static_cast<float>((i * 2654435761u >> 7) % 33) / 8.0f - 2.0f);
}

// Up to 1 in magnitude: sums of them are rounded, in each order otherwise.
uint16_t rounded(int64_t i) {
  return top_half(static_cast<float>((i * 2654435761u >> 7) % 1009) / 504.0f - 1.0f);
}

double value(uint16_t x) { return bits<float>(uint32_t{x} << 16); }

struct Matrix {  // [rows, columns] of bfloat16 in rows that are longer, NaN behind them
  Matrix(int64_t rows, int64_t columns, uint16_t (*element)(int64_t) = some)
      : stride(columns + 5), data(rows * stride + 64, kNan) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) data[r * stride + c] = element(r * columns + c + 1);
    }
  }
  int64_t stride;
  std::vector<uint16_t> data;
  double at(int64_t r, int64_t c) const { return value(data[r * stride + c]); }
};

void expect(float found, double expected, const char* what, int64_t rows, int64_t depth,
            int64_t columns) {
  if (found == static_cast<float>(expected)) return;
  std::fprintf(stderr, "%s of %ld x %ld x %ld: %g, not %g\n", what, rows, depth, columns, found,
               expected);
  std::exit(1);
}

double product_of(const Matrix& left, const Matrix& right, int64_t r, int64_t c, int64_t depth) {
  double sum = 0;
  for (int64_t k = 0; k < depth; ++k) sum += left.at(r, k) * right.at(k, c);
  return sum;
}

// A panel of pairs, as `pack` leaves it.
std::vector<uint32_t> panel_of(const Matrix& right, int64_t depth, int64_t columns) {
  std::vector<uint32_t> panel(up_to(2 * kTile, depth) / 2 * kPanelColumns<float>, 0x7fc07fc0);
  kPairedAmx.pack({.data = right.data.data(),
                   .dtype = accumext::Dtype::kBFloat16,
                   .depth = depth,
                   .columns = columns,
                   .depth_stride = right.stride,
                   .column_stride = 1},
                  panel.data());
  return panel;
}

// Rows [begin, end) of a block to `out` [rows, stride].
void multiply(const Matrix& left, const std::vector<uint32_t>& panel, int64_t begin, int64_t end,
              int64_t depth, int64_t columns, float* out, int64_t stride, bool add) {
  kPairedAmx.multiply({.left = left.data.data() + begin * left.stride,
                       .row_stride = left.stride,
                       .panel = panel.data(),
                       .rows = end - begin,
                       .depth = depth,
                       .columns = columns,
                       .out = out + begin * stride,
                       .out_stride = stride,
                       .add = add});
}

void check_block(int64_t rows, int64_t depth, int64_t columns, bool add) {
  const Matrix left(rows, depth), right(depth, columns);
  const int64_t stride = columns + 3;
  std::vector<float> before(rows * stride);
  std::iota(before.begin(), before.end(), 0.0f);
  std::vector<float> out = before;
  multiply(left, panel_of(right, depth, columns), 0, rows, depth, columns, out.data(), stride, add);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < stride; ++c) {
      const double sum = c < columns ? product_of(left, right, r, c, depth) : 0.0;
      expect(out[r * stride + c], sum + (add || c >= columns ? before[r * stride + c] : 0.0),
             "a block", rows, depth, columns);
    }
  }
}

void check_transpose(int64_t depth, int64_t rows) {
  const Matrix from(depth, rows);
  const int64_t stride = up_to(2 * kTile, depth);
  std::vector<uint16_t> to(rows * stride, kNan);
  kPairedAmx.transpose(from.data.data(), from.stride, depth, rows, to.data(), stride);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < stride; ++k) {
      expect(static_cast<float>(value(to[r * stride + k])), k < depth ? from.at(k, r) : 0.0,
             "a transposed element", rows, depth, k);
    }
  }
}

std::vector<uint16_t> skinny_panel_of(const Matrix& right, int64_t depth, int64_t columns) {
  const int64_t width = up_to(kTile, columns);
  std::vector<uint16_t> panel(up_to(2 * kTile, depth) * width, 0);
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t c = 0; c < columns; ++c) {
      panel[(k / 2 * width + c) * 2 + k % 2] = right.data[k * right.stride + c];
    }
  }
  return panel;
}

// Rows [begin, end) of a skinny product, with a bias plus the number of the row, to `out` [rows,
// columns].
void multiply_skinny(const Matrix& weight, const std::vector<uint16_t>& panel, int64_t begin,
                     int64_t end, int64_t depth, int64_t columns, float* out, bool biased) {
  std::vector<float> bias(end);
  std::iota(bias.begin(), bias.end(), 0.0f);
  kPairedAmx.product({.weight = weight.data.data(),
                      .weight_dtype = accumext::Dtype::kBFloat16,
                      .depth = depth,
                      .stride = weight.stride,
                      .panel = panel.data(),
                      .paired = true,
                      .columns = columns,
                      .bias = biased ? bias.data() : nullptr,
                      .out = out,
                      .out_stride = columns},
                     begin, end);
}

void check_skinny(int64_t rows, int64_t depth, int64_t columns, bool biased) {
  const Matrix weight(rows, depth), right(depth, columns);
  std::vector<float> out(rows * columns, kUntouched);
  multiply_skinny(weight, skinny_panel_of(right, depth, columns), 0, rows, depth, columns,
                  out.data(), biased);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const double sum = product_of(weight, right, r, c, depth) + (biased ? r : 0);
      expect(out[r * columns + c], sum, "a skinny product", rows, depth, columns);
    }
  }
}

// Threads cut rows anywhere: a row has the same bits in every group of rows.
void check_groups(int64_t depth, int64_t columns) {
  constexpr int64_t kRows = 70;
  const Matrix left(kRows, depth, rounded), right(depth, columns, rounded);
  const auto panel = panel_of(right, depth, columns);
  const auto skinny_panel = skinny_panel_of(right, depth, columns);
  std::vector<float> whole(2 * kRows * columns), grouped(2 * kRows * columns);
  const auto run = [&](int64_t begin, int64_t end, float* out) {
    multiply(left, panel, begin, end, depth, columns, out, columns, false);
    multiply_skinny(left, skinny_panel, begin, end, depth, columns, out + kRows * columns, true);
  };
  run(0, kRows, whole.data());
  const int64_t cuts[] = {0, 1, 8, 24, 41, kRows};
  for (int i = 0; i < 5; ++i) run(cuts[i], cuts[i + 1], grouped.data());
  emulated::require(whole == grouped, "a row depends on the rows that it is computed with");
}

}  // namespace

int main() {
  for (const int64_t rows : {1, 31, 32, 33, 70}) {
    for (const int64_t depth : {1, 2, 31, 32, 33, 64, 97}) {
      for (const int64_t columns : {1, 15, 16, 17, 31, 32}) {
        check_block(rows, depth, columns, rows % 2 == 0);
        check_skinny(rows, depth, columns, rows % 2 == 0);
      }
      check_transpose(depth, rows);
    }
  }
  check_groups(97, 32);
  check_groups(64, 16);
  emulated::require(!emulated::configured, "the tiles were not released");
}
