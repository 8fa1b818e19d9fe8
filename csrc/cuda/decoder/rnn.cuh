// Kernels of a recurrent layer's step, forward and backward, element by element: what stands
// between the products with its weights. One launch each.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/decoder/matrix.h"
#include "cuda/device.cuh"
#include "math/gates.h"

namespace accumext::cuda {

template <CellKind kKind>
constexpr int kGates = gate_count(kKind);  // device code may use the constant, not call a constexpr

// Rows are cut into blocks, so that all threads of one share a row. A thread takes one unit: these
// launches are short, and most of their time is that of a few accesses one after another.
inline int64_t blocks_per_row(int64_t units) { return (units + kBlockSize - 1) / kBlockSize; }

struct Unit {
  int64_t row, unit;

  __device__ explicit Unit(int64_t units) {
    const int64_t blocks = (units + kBlockSize - 1) / kBlockSize;
    row = blockIdx.x / blocks;
    unit = blockIdx.x % blocks * kBlockSize + threadIdx.x;
  }
};

__device__ inline bool is_live(const Column<const bool>& live, int64_t row) {
  return live.data == nullptr || live[row];
}

template <typename T>
__device__ T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

template <typename T>
struct Advance {
  int64_t units;
  Matrix<const T> from_x, from_h;  // [B, gates units]
  Column<const bool> live;         // [B], or null: all are
  Matrix<const T> h, c;            // [B, units]; c of an LSTM
  Matrix<T> h_next, c_next;        // [B, units]; c_next of an LSTM
};

// The state after a step; that before it in rows that are not live.
//
//   grid    rows times blocks_per_row    block   kBlockSize threads, one per unit of a row
//   reads   from_x and from_h, T, [B, gates units]; h, and c of an LSTM, [B, units]; live, bool,
//   [B] writes  h_next, and c_next of an LSTM, T, [B, units], which may be h and c So 6 T of a
//   GRU's unit are read and 1 written with h; 9 and 2 of an LSTM's; 2 and 1 of an RNN's.
template <typename T, CellKind kKind>
__global__ void __launch_bounds__(kBlockSize) rnn_advance_kernel(Advance<T> call) {
  const auto [row, unit] = Unit(call.units);
  if (unit >= call.units) return;
  if (!is_live(call.live, row)) {
    *call.h_next.at(row, unit) = *call.h.at(row, unit);
    if (kKind == CellKind::kLstm) *call.c_next.at(row, unit) = *call.c.at(row, unit);
    return;
  }
  const auto x = [&](int gate) { return *call.from_x.at(row, gate * call.units + unit); };
  const auto h = [&](int gate) { return *call.from_h.at(row, gate * call.units + unit); };
  T next;
  if constexpr (kKind == CellKind::kGru) {
    const T r = sigmoid(x(0) + h(0));
    const T z = sigmoid(x(1) + h(1));
    next = gru_state(z, std::tanh(x(2) + r * h(2)), *call.h.at(row, unit));
  } else if constexpr (kKind == CellKind::kLstm) {
    const T i = sigmoid(x(0) + h(0));
    const T f = sigmoid(x(1) + h(1));
    const T g = std::tanh(x(2) + h(2));
    const T o = sigmoid(x(3) + h(3));
    const T c = lstm_memory(i, f, g, *call.c.at(row, unit));
    *call.c_next.at(row, unit) = c;
    next = o * std::tanh(c);
  } else {
    const T pre = x(0) + h(0);
    if constexpr (kKind == CellKind::kRnnTanh) {
      next = std::tanh(pre);
    } else {
      next = pre < 0 ? T(0) : pre;  // a NaN stays one
    }
  }
  *call.h_next.at(row, unit) = next;
}

template <typename T>
struct Gradient {
  int64_t units;
  Matrix<const T> d_out;         // [B, units]
  Matrix<const T> pre;           // [B, 4 units]; not of a plain RNN
  Matrix<const T> h, c, c_next;  // [B, units]; c and c_next of an LSTM
  Column<const bool> live;       // [B], or null: all are
  Matrix<T> dh, dc;              // [B, units]; dc of an LSTM
  Matrix<T> d_x, d_h;            // [B, gates units]; d_h may be null
};

// One step backward: gradients of the gates, 0 in rows that are not live; dh and dc, unchanged in
// those rows, become what reaches the state before the step past the product with weight_hh.
//
//   grid    rows times blocks_per_row    block   kBlockSize threads, one per unit of a row
//   reads   dh and d_out, T, [B, units]; pre, [B, 4 units], not of a plain RNN; h, [B, units]; c,
//           c_next and dc of an LSTM, [B, units]; live, bool, [B]
//   writes  d_x and d_h, T, [B, gates units], d_h unless null; dh, and dc of an LSTM, [B, units]
//   So 7 T of a GRU's unit are read and 7 written with d_h; 9 and 6 of an LSTM's, which needs no h;
//   3 and 2 of an RNN's.
template <typename T, CellKind kKind>
__global__ void __launch_bounds__(kBlockSize) rnn_gradient_kernel(Gradient<T> call) {
  const auto [row, unit] = Unit(call.units);
  if (unit >= call.units) return;
  const auto put = [&](int gate, T d_x, T d_h) {
    *call.d_x.at(row, gate * call.units + unit) = d_x;
    if (call.d_h.data != nullptr) *call.d_h.at(row, gate * call.units + unit) = d_h;
  };
  if (!is_live(call.live, row)) {
    for (int gate = 0; gate < kGates<kKind>; ++gate) put(gate, T(0), T(0));
    return;
  }
  const auto pre = [&](int gate) { return *call.pre.at(row, gate * call.units + unit); };
  T* const dh = call.dh.at(row, unit);
  const T up = *dh + *call.d_out.at(row, unit);
  if constexpr (kKind == CellKind::kGru) {
    const T r = sigmoid(pre(0));
    const T n_h = pre(3);
    const T n = std::tanh(pre(2) + r * n_h);
    const auto d = gru_gradient(up, r, sigmoid(pre(1)), n, n_h, *call.h.at(row, unit));
    put(0, d.r_pre, d.r_pre);
    put(1, d.z_pre, d.z_pre);
    put(2, d.n_x, d.n_h);
    *dh = d.h;
  } else if constexpr (kKind == CellKind::kLstm) {
    T* const dc = call.dc.at(row, unit);
    const auto d =
        lstm_gradient(up, *dc, sigmoid(pre(0)), sigmoid(pre(1)), std::tanh(pre(2)), sigmoid(pre(3)),
                      *call.c.at(row, unit), std::tanh(*call.c_next.at(row, unit)));
    put(0, d.i_pre, d.i_pre);
    put(1, d.f_pre, d.f_pre);
    put(2, d.g_pre, d.g_pre);
    put(3, d.o_pre, d.o_pre);
    *dc = d.c;
    *dh = T(0);
  } else {
    const T h = *call.h.at(row, unit);  // after the step
    T d;
    if constexpr (kKind == CellKind::kRnnTanh) {
      d = up * (T(1) - h * h);
    } else {
      d = up * (h > 0 ? T(1) : T(0));
    }
    put(0, d, d);
    *dh = T(0);
  }
}

}  // namespace accumext::cuda
