// One layer's step backward, between the products with weight_hh.
#pragma once

#include "cuda/decoder/rnn_units.cuh"

namespace accumext::cuda {

// What a step sends back to the state before it: dh and dc, to which the product with weight_hh is
// to be added, then multiplied by the gate and bounded.
template <typename T>
struct Passing {
  Matrix<T> dh, dc;         // [B, units]; dc of an LSTM, else null
  Matrix<const T> product;  // [B, units]: of weight_hh; null: no step has sent anything
  Column<const T> gate;     // [B]: a factor, 0 of which cuts off even infinity; or null
  const T* limit;           // the largest magnitude, or null
};

template <typename T>
__device__ T passed_on(const Passing<T>& passing, int64_t row, T x) {
  if (passing.product.data == nullptr) return x;
  if (passing.gate.data != nullptr) {
    const T factor = passing.gate[row];
    x = factor == T(0) ? T(0) : x * factor;
  }
  if (passing.limit != nullptr) {
    const T limit = *passing.limit;
    x = x > limit ? limit : x < -limit ? -limit : x;
  }
  return x;
}

template <typename T>
__device__ T passed_dh(const Passing<T>& passing, int64_t row, int64_t unit) {
  const T dh = *passing.dh.at(row, unit);
  const T product = passing.product.data == nullptr ? T(0) : *passing.product.at(row, unit);
  return passed_on(passing, row, dh + product);
}

template <typename T>
struct Gradient {
  int64_t units;
  Passing<T> passing;            // from the step behind this one
  Matrix<const T> d_out;         // [B, units]
  Matrix<const T> pre;           // [B, 4 units]; not of a plain RNN
  Matrix<const T> h, c, c_next;  // [B, units]; c and c_next of an LSTM
  Column<const bool> live;       // [B], or null: all are
  Matrix<T> d_x, d_h;            // [B, gates units]; d_h may be null
  AnyMatrix operand;             // [B, gates units]: d_h, or d_x, as the product reads it
};

// One step backward: gradients of the gates, 0 in rows that are not live; dh and dc, passed on
// unchanged in those rows, become what reaches the state before the step past the product with
// weight_hh.
//
//   grid    rows times blocks_per_row    block   kBlockSize threads, one per unit of a row
//   reads   dh, product and d_out, T, [B, units]; pre, [B, 4 units], not of a plain RNN; h,
//           [B, units]; c, c_next and dc of an LSTM, [B, units]; live, bool, and gate, T, [B];
//           limit
//   writes  d_x and d_h, T, [B, gates units], d_h unless null; operand, any dtype, the same; dh,
//   and
//           dc of an LSTM, [B, units]
//   So 8 T of a GRU's unit are read and 7 written with d_h; 10 and 6 of an LSTM's, which needs no
//   h; 4 and 2 of an RNN's; and the copy of d_h.
template <typename T, CellKind kKind>
__global__ void __launch_bounds__(kBlockSize) rnn_gradient_kernel(Gradient<T> call) {
  const auto [row, unit] = Unit(call.units);
  if (unit >= call.units) return;
  const auto leave = [&](int gate, T d_x, T d_h) {
    const int64_t column = gate * call.units + unit;
    *call.d_x.at(row, column) = d_x;
    if (call.d_h.data != nullptr) *call.d_h.at(row, column) = d_h;
    put(call.operand, row, column, d_h);
  };
  T* const dh = call.passing.dh.at(row, unit);
  const T behind = passed_dh(call.passing, row, unit);
  T* dc = nullptr;
  T behind_c = T(0);
  if constexpr (kKind == CellKind::kLstm) {
    dc = call.passing.dc.at(row, unit);
    behind_c = passed_on(call.passing, row, *dc);
  }
  if (!is_live(call.live, row)) {
    for (int gate = 0; gate < kGates<kKind>; ++gate) leave(gate, T(0), T(0));
    *dh = behind;
    if (kKind == CellKind::kLstm) *dc = behind_c;
    return;
  }
  const auto pre = [&](int gate) { return *call.pre.at(row, gate * call.units + unit); };
  const T up = behind + *call.d_out.at(row, unit);
  if constexpr (kKind == CellKind::kGru) {
    const T r = sigmoid(pre(0));
    const T n_h = pre(3);
    const T n = std::tanh(pre(2) + r * n_h);
    const auto d = gru_gradient(up, r, sigmoid(pre(1)), n, n_h, *call.h.at(row, unit));
    leave(0, d.r_pre, d.r_pre);
    leave(1, d.z_pre, d.z_pre);
    leave(2, d.n_x, d.n_h);
    *dh = d.h;
  } else if constexpr (kKind == CellKind::kLstm) {
    const auto d = lstm_gradient(up, behind_c, sigmoid(pre(0)), sigmoid(pre(1)), std::tanh(pre(2)),
                                 sigmoid(pre(3)), *call.c.at(row, unit),
                                 std::tanh(*call.c_next.at(row, unit)));
    leave(0, d.i_pre, d.i_pre);
    leave(1, d.f_pre, d.f_pre);
    leave(2, d.g_pre, d.g_pre);
    leave(3, d.o_pre, d.o_pre);
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
    leave(0, d, d);
    *dh = T(0);
  }
}

// What the first step passes on: dh and dc become the gradients of the state before it.
//
//   grid    rows times blocks_per_row    block   kBlockSize threads, one per unit of a row
//   reads   dh and product, T, [B, units]; dc of an LSTM, [B, units]; gate, T, [B]; limit
//   writes  dh, and dc of an LSTM, [B, units]
template <typename T>
__global__ void __launch_bounds__(kBlockSize)
    rnn_pass_on_kernel(int64_t units, Passing<T> passing) {
  const auto [row, unit] = Unit(units);
  if (unit >= units) return;
  *passing.dh.at(row, unit) = passed_dh(passing, row, unit);
  if (passing.dc.data == nullptr) return;
  T* const dc = passing.dc.at(row, unit);
  *dc = passed_on(passing, row, *dc);
}

}  // namespace accumext::cuda
