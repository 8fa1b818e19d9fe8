// One layer's state after a step, from the products with its weights.
#pragma once

#include "cuda/decoder/rnn_units.cuh"

namespace accumext::cuda {

template <typename T>
struct Advance {
  int64_t units;
  Matrix<const T> from_x, from_h;  // [B, gates units]: W_ih x and W_hh h
  Column<const T> bias_x, bias_h;  // [gates units], or null
  Column<const bool> active;       // [B], or null: all are
  Matrix<const T> h, c;            // [B, units]; c of an LSTM
  Matrix<T> h_next, c_next;        // [B, units]; c_next of an LSTM
  // Rounded copies of h_next, [B, units], or null, for products:
  AnyMatrix operand;        // of the layer itself in the next step
  AnyMatrix output;         // of the layer above or of the head, with dropout
  Matrix<const bool> kept;  // [B, units]: units that dropout keeps; or null: all
  T scale;                  // factor of these units
};

// Writes the state after a step; in rows that are not active, the state before it.
//
//   grid    rows times blocks_per_row    block   kBlockSize threads, one per unit of a row
//   reads   from_x and from_h, T, [B, gates units]; bias_x and bias_h, T, [gates units]; h, and c
//   of
//           an LSTM, T, [B, units]; active, bool, [B]; kept, bool, [B, units]
//   writes  h_next, and c_next of an LSTM, T, [B, units], which may be h and c; operand and output,
//           any dtype, [B, units]
//   So 6 T of a GRU's unit are read and 1 written with h; 9 and 2 of an LSTM's; 2 and 1 of an
//   RNN's; and the two copies. Biases are the same for every row.
template <typename T, CellKind kKind>
__global__ void __launch_bounds__(kBlockSize) rnn_advance_kernel(Advance<T> call) {
  const auto [row, unit] = Unit(call.units);
  if (unit >= call.units) return;
  const auto leave = [&](T h) {
    *call.h_next.at(row, unit) = h;
    put(call.operand, row, unit, h);
    const bool drops = call.kept.data != nullptr;
    put(call.output, row, unit, drops ? h * T(*call.kept.at(row, unit)) * call.scale : h);
  };
  if (!is_live(call.active, row)) {
    if (kKind == CellKind::kLstm) *call.c_next.at(row, unit) = *call.c.at(row, unit);
    return leave(*call.h.at(row, unit));
  }
  const auto sum = [&](const Matrix<const T>& product, const Column<const T>& bias, int gate) {
    const int64_t column = gate * call.units + unit;
    const T x = *product.at(row, column);
    return bias.data == nullptr ? x : x + bias[column];
  };
  const auto x = [&](int gate) { return sum(call.from_x, call.bias_x, gate); };
  const auto h = [&](int gate) { return sum(call.from_h, call.bias_h, gate); };
  if constexpr (kKind == CellKind::kGru) {
    const T r = sigmoid(x(0) + h(0));
    const T z = sigmoid(x(1) + h(1));
    leave(gru_state(z, std::tanh(x(2) + r * h(2)), *call.h.at(row, unit)));
  } else if constexpr (kKind == CellKind::kLstm) {
    const T i = sigmoid(x(0) + h(0));
    const T f = sigmoid(x(1) + h(1));
    const T g = std::tanh(x(2) + h(2));
    const T o = sigmoid(x(3) + h(3));
    const T c = lstm_memory(i, f, g, *call.c.at(row, unit));
    *call.c_next.at(row, unit) = c;
    leave(o * std::tanh(c));
  } else {
    const T pre = x(0) + h(0);
    if constexpr (kKind == CellKind::kRnnTanh) {
      leave(std::tanh(pre));
    } else {
      leave(pre < 0 ? T(0) : pre);  // a NaN stays one
    }
  }
}

}  // namespace accumext::cuda
