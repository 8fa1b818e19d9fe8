// The inner loops of the decoder, compiled once for each instruction set like those of kernels.h.
// T is what sums are formed in: float, or double for double operands.
#pragma once

#include <cstdint>

#include "common/operands.h"
#include "math/gates.h"

namespace accumext::cpu {

constexpr int64_t kColumnPad = 8;  // columns of a panel are a multiple of this
constexpr int64_t kRowBlock = 12;  // rows of a weight whose products are formed at once
constexpr int64_t kSpan = 480;     // rows of logits per partial sum: a multiple of every row block

constexpr int64_t up_to(int64_t multiple, int64_t x) { return (x + multiple - 1) & -multiple; }

inline int64_t padded(int64_t columns) { return up_to(kColumnPad, columns); }

// A panel of pairs of bfloat16 is made of tiles, 16 pairs of terms by 16 columns: 64 bytes each
// way.
constexpr int64_t kTile = 16;

// weight [rows, depth] times a panel [depth, padded(columns)] plus bias [rows].
template <typename T>
struct Product {
  const void* weight;
  Dtype weight_dtype;
  int64_t depth;
  int64_t stride;  // elements from one row of weight to the next
  // Of T; if paired of bfloat16, [up_to(2 * kTile, depth) / 2, up_to(kTile, columns), 2]; zeros in
  // the padding.
  const void* panel;
  bool paired;
  int64_t columns;
  const T* bias;  // [rows] or null
  T* out;         // [rows, out_stride]: the first `columns` of each row are written
  int64_t out_stride;
  T* scratch;  // [kRowBlock, depth] where a weight of half precision is not paired, else null
};

// Columns of logits z [V, columns] and what becomes of them.
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
  // Rows [begin, end) of the product.
  void (*product)(const Product<T>& product, int64_t begin, int64_t end);

  // Of rows [begin, end) and every column: the largest logit and the first row that has it.
  void (*peaks)(const Logits<T>& logits, int64_t begin, int64_t end, T* peak, int64_t* row);

  // Writes exps; sums exp(z - peak), and exp((z - peak) / temperature) into `tempered` unless null.
  void (*exponentials)(const Logits<T>& logits, int64_t begin, int64_t end, T* sum, T* tempered);

  // The first row of [begin, end) at which the running sum of one column's tempered exponentials
  // passes `threshold`; if rounding keeps it below, the last row whose exponential is not 0.
  int64_t (*pick)(const Logits<T>& logits, int64_t column, int64_t begin, int64_t end,
                  double threshold);

  // The state after the step; c for an LSTM.
  void (*forward)(CellKind kind, const Gates<T>& gates, T* h, T* c);

  // From the gradients of the state after the step, dh and, for an LSTM, dc: those of the
  // pre-activations (layout of Gates::pre); dh and dc become those of the state before the step,
  // but for the part that comes through weight_hh.
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

// Rows [begin, end) of a paired product; null where the processor has no AVX512-BF16.
using PairedProduct = void (*)(const Product<float>& product, int64_t begin, int64_t end);
PairedProduct paired_product();
void paired_product_avx512(const Product<float>& product, int64_t begin, int64_t end);

#if defined(__x86_64__) && defined(__linux__) && __GNUC__ >= 11
#define ACCUMEXT_AMX
bool amx_granted();  // whether the processor has AMX-BF16 and the system lets this process use it
void paired_product_amx(const Product<float>& product, int64_t begin, int64_t end);
#endif

}  // namespace accumext::cpu
