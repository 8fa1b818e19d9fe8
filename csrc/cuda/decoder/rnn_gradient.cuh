// One layer's step backward: the kernel of rnn_gradient.
#pragma once

#include "cuda/decoder/rnn_units.cuh"

namespace accumext::cuda {

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
