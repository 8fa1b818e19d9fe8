// A window of decoder steps as the argument of one kernel: no torch here, and no CUDA.
#pragma once

#include <cstdint>

#include "common/operands.h"
#include "cuda/decoder/matrix.h"
#include "math/gates.h"

namespace accumext::cuda {

constexpr int kMaxLayers = 8;  // of a window, since they are part of the kernel's arguments

// Contiguous elements of a dtype that is known at run time.
struct AnyVector {
  const void* data = nullptr;  // null: there is none
  Dtype dtype = Dtype::kFloat;
};

struct PersistentLayer {
  Matrix<const uint16_t> weight_ih;  // [gates H, E or H], of the window's operand dtype
  Matrix<const uint16_t> weight_hh;  // [gates H, H], elements of a row next to each other
  AnyVector bias_ih, bias_hh;        // [gates H]
  float* h;                          // [T + 1, B, H], contiguous
  float* c;                          // the same of an LSTM, else null
};

// The arguments of decode_steps with a head, which accumext/decoder/_operators.py describes.
// Tensors [T, B] are contiguous; so are the states and the dropout mask.
struct PersistentCall {
  CellKind kind;
  Dtype operand;  // kHalf or kBFloat16: of the weights, and what x and h are rounded to
  int layers;
  int64_t batch, inputs, units, vocabulary;  // B, E, H, V
  int64_t steps, begin, end;                 // T; the window is [begin, end)
  AnyMatrix table;                           // [R, E], elements of a row next to each other
  int64_t table_rows;                        // R
  PersistentLayer layer[kMaxLayers];
  const bool* dropout_mask;  // [T, L - 1, B, H], or null
  float dropout_scale;
  int64_t* inputs_fed;          // [T, B]
  const int64_t* teacher;       // [T, B], or null
  const bool* teacher_mask;     // [T, B], or null
  bool* active;                 // [T, B], or null
  int64_t eos, pad;             // eos: -1 for none, else `active` is given
  const double* uniforms;       // [T, B], or null
  double temperature;           // above 0
  Matrix<const uint16_t> head;  // [V, H] of the operand dtype, elements of a row next to each other
  AnyVector head_bias;          // [V]
  const int64_t* targets;       // [T, B], or null: the tokens
  int64_t* tokens;              // [T, B]
  AnyMatrix exps;               // [(end - begin) B, V], not double; or null
  Matrix<float> stats;          // [3, (end - begin) B]
  int64_t* rows;                // [(end - begin) B]: t B + b
};

}  // namespace accumext::cuda
