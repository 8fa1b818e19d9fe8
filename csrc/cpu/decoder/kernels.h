// The inner loops of the decoder, compiled once for each instruction set, like cpu/kernels.h.
// T is the type of sums: float, or double for double operands.
#pragma once

#include <cstdint>

#include "common/operands.h"
#include "math/distributions.h"
#include "math/gates.h"

namespace accumext::cpu {

constexpr int64_t kColumnPad = 8;   // columns of a panel are a multiple of this
constexpr int64_t kDotColumns = 4;  // up to so many, a panel is transposed
constexpr int64_t kRowBlock = 12;   // rows of a paired weight whose products are formed at once
constexpr int64_t kSpan = 480;      // rows of logits per partial sum: a multiple of every row block

constexpr int64_t up_to(int64_t multiple, int64_t x) { return (x + multiple - 1) & -multiple; }

inline int64_t padded(int64_t columns) { return up_to(kColumnPad, columns); }

// A panel of pairs of bfloat16 is made of tiles, 16 pairs of terms by 16 columns: 64 bytes each
// way.
constexpr int64_t kTile = 16;

// weight [rows, depth] times a panel plus bias [rows].
template <typename T>
struct Product {
  const void* weight;
  Dtype weight_dtype;
  int64_t depth;
  int64_t stride;  // elements from one row of weight to the next
  // Of T: [depth, padded(columns)], or [columns, depth] if there are at most kDotColumns. Paired,
  // of bfloat16: [up_to(2 * kTile, depth) / 2, up_to(kTile, columns), 2]. The padding is zeros.
  const void* panel;
  bool paired;
  int64_t columns;
  const T* bias;  // [rows] or null
  T* out;         // [rows, out_stride]: the first `columns` of each row are written
  int64_t out_stride;
};

// Columns of a panel, the part of the right operand of a large product that is multiplied at once:
// two of the widest registers.
template <typename T>
constexpr int64_t kPanelColumns = 128 / sizeof(T);

// The matrix that panels are made of, [depth, columns] with any strides.
struct PanelSource {
  const void* data;
  Dtype dtype;
  int64_t depth;
  int64_t columns;
  int64_t depth_stride;  // elements
  int64_t column_stride;
  int64_t panel_size;  // elements from one panel to the next
};

// The matrix that rows are packed from, [rows, depth] with any strides.
struct RowSource {
  const void* data;
  Dtype dtype;
  int64_t rows;
  int64_t depth;
  int64_t row_stride;  // elements
  int64_t depth_stride;
};

// out [rows, columns] = left [rows, depth] times a panel, or out += this.
template <typename T>
struct Block {
  const void* left;    // packed rows of T; for a paired panel rows of bfloat16
  int64_t row_stride;  // elements, for a paired panel
  // Of T, packed; paired of bfloat16, [up_to(2 * kTile, depth) / 2, kPanelColumns, 2], zeros in the
  // padding.
  const void* panel;
  int64_t rows;
  int64_t depth;
  int64_t columns;
  T* out;
  int64_t out_stride;
  bool add;
};

// Columns of logits z [V, columns], and the places of their results.
template <typename T>
struct Logits {
  T* z;
  int64_t stride;
  int64_t columns;
  const T* peak;  // [columns]: the largest logit
  double inverse_temperature;
  void* exps;  // exp(z - peak), [V, exps_stride]; null: not kept
  Dtype exps_dtype;
  int64_t exps_stride;
};

// Columns of logits z [V, columns], those of a teacher, and the places of the results of both
// distributions.
template <typename T>
struct Distributions {
  T* z;
  int64_t stride;
  int64_t columns;
  const T* peak;     // [columns]: the largest logit
  const T* teacher;  // logits [V, stride]; null: there is none
  const T* teacher_peak;
  double inverse_temperature;
  DistributionFactors<const T*> factors;  // [columns] each
  void* gradients;                        // [V, gradients_stride]
  Dtype gradients_dtype;
  int64_t gradients_stride;
};

// Flat arrays of the pre-activations, forward or backward, of `size` units.
template <typename T>
struct Gates {
  const T* pre[4];   // GRU: r, z, n_x, n_h; LSTM: i, f, g, o; RNN: one
  const T* h;        // forward: before the step (GRU); backward: the same, and for an RNN after it
  const T* c;        // LSTM: before the step
  const T* c_after;  // backward of LSTM
  int64_t size;
};

template <typename T>
struct DecoderKernels {
  int64_t panel_terms;  // at most, of a panel that stays in the first cache

  // Rows [begin, end) of the product.
  void (*product)(const Product<T>& product, int64_t begin, int64_t end);

  // Elements of any dtype as T.
  void (*read)(Dtype dtype, const void* from, int64_t count, T* to);

  // Rounds x to the dtype of the weight that it is multiplied with.
  void (*round)(Dtype dtype, T* x, int64_t count);

  // Put both operands of `multiply` into the order in which it reads them: a panel has
  // depth * kPanelColumns elements, the rows have rows * depth.
  void (*pack)(const PanelSource& source, T* panels);
  void (*pack_rows)(const RowSource& source, T* rows);

  // All rows of a block times its panel.
  void (*multiply)(const Block<T>& block);

  // Finds the largest logit of rows [begin, end) in every column, and the first row that has it.
  void (*peaks)(const Logits<T>& logits, int64_t begin, int64_t end, T* peak, int64_t* row);

  // Writes exps; sums exp(z - peak), and exp((z - peak) / temperature) into `tempered` unless null.
  void (*exponentials)(const Logits<T>& logits, int64_t begin, int64_t end, T* sum, T* tempered);

  // The first row of [begin, end) at which the running sum of one column's tempered exponentials
  // passes `threshold`; if rounding keeps it below, the last row whose exponential is not 0.
  int64_t (*pick)(const Logits<T>& logits, int64_t column, int64_t begin, int64_t end,
                  double threshold);

  // Computes sums [kDistributionSums, columns] over rows [begin, end); those of a teacher only if
  // there is one.
  void (*sum)(const Distributions<T>& distributions, int64_t begin, int64_t end, T* sums);

  // Writes the gradient of the same rows to `gradients`, and in place of z.
  void (*differentiate)(const Distributions<T>& distributions, int64_t begin, int64_t end);

  // The state after the step; c for an LSTM.
  void (*forward)(CellKind kind, const Gates<T>& gates, T* h, T* c);

  // Computes the gradients of the pre-activations (layout of Gates::pre) from those of the state
  // after the step, dh and, for an LSTM, dc. These become the gradients of the state before the
  // step, without the part that comes through weight_hh.
  void (*backward)(CellKind kind, const Gates<T>& gates, T* dh, T* dc, T* const* d_pre);
};

template <typename T>
const DecoderKernels<T>& decoder_kernels();  // of this processor
template <>
const DecoderKernels<float>& decoder_kernels();
template <>
const DecoderKernels<double>& decoder_kernels();

#define ACCUMEXT_DECODER_KERNELS(set)               \
  extern const DecoderKernels<float> k##set##Float; \
  extern const DecoderKernels<double> k##set##Double
ACCUMEXT_DECODER_KERNELS(Portable);
ACCUMEXT_DECODER_KERNELS(Avx2);
ACCUMEXT_DECODER_KERNELS(Avx512);
#undef ACCUMEXT_DECODER_KERNELS

// Products of bfloat16 operands, two terms at a time; sums are in float.
struct PairedKernels {
  void (*product)(const Product<float>& product, int64_t begin, int64_t end);

  // Paired panels, whose elements are rounded to bfloat16.
  void (*pack)(const PanelSource& source, uint32_t* panels);

  void (*multiply)(const Block<float>& block);

  // to [rows, stride] = from [depth, rows], transposed, with zeros up to `stride`, a multiple of
  // 2 * kTile.
  void (*transpose)(const uint16_t* from, int64_t from_stride, int64_t depth, int64_t rows,
                    uint16_t* to, int64_t stride);
};
const PairedKernels* paired_kernels();  // null if the processor has no AVX512-BF16
extern const PairedKernels kPairedAvx512;

#if defined(__x86_64__) && defined(__linux__) && __GNUC__ >= 11
#define ACCUMEXT_AMX
bool amx_granted();  // whether the processor has AMX-BF16 and the system lets this process use it
extern const PairedKernels kPairedAmx;
#endif

}  // namespace accumext::cpu
