// One layer's state after a step: the kernel of rnn_advance.
#pragma once

#include "cuda/decoder/rnn_units.cuh"

namespace accumext::cuda {

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

}  // namespace accumext::cuda
