// One layer's step backward, between the products with weight_hh.
#pragma once

#include "cuda/decoder/rnn_units.cuh"

namespace accumext::cuda {

// The factor and bound of a gradient on its way to the state before a step.
template <typename T>
struct Carry {
  Column<const T> gate;  // [B]: a factor, 0 of which cuts off even infinity; or null
  const T* limit;        // the largest magnitude, or null
};

template <typename T>
__device__ T carried(const Carry<T>& carry, int64_t row, T x) {
  if (carry.gate.data != nullptr) {
    const T factor = carry.gate[row];
    x = factor == T(0) ? T(0) : x * factor;
  }
  if (carry.limit != nullptr) {
    const T limit = *carry.limit;
    x = x > limit ? limit : x < -limit ? -limit : x;
  }
  return x;
}

// The gradients that a step sends back to the state before it: dh, to which the product with
// weight_hh is added, and dc; then `carry` is applied to both.
template <typename T>
struct Passing {
  Matrix<T> dh, dc;         // [B, units]; dc of an LSTM, else null
  Matrix<const T> product;  // [B, units]: with weight_hh; null: none in the first step
  Carry<T> carry;
};

template <typename T>
__device__ T passed_dh(const Passing<T>& passing, int64_t row, int64_t unit) {
  const T dh = *passing.dh.at(row, unit);
  if (passing.product.data == nullptr) return dh;
  return carried(passing.carry, row, dh + *passing.product.at(row, unit));
}

template <typename T>
__device__ T passed_dc(const Passing<T>& passing, int64_t row, int64_t unit) {
  const T dc = *passing.dc.at(row, unit);
  return passing.product.data == nullptr ? dc : carried(passing.carry, row, dc);
}

// The inputs of a step backward, and its gradients of the gates.
template <typename T>
struct Gradient {
  int64_t units;
  Matrix<const T> d_out;         // [B, units]
  Matrix<const T> pre;           // [B, 4 units]; not of a plain RNN
  Matrix<const T> h, c, c_next;  // [B, units]; c and c_next of an LSTM
  Column<const bool> active;     // [B], or null: all are
  Matrix<T> d_x, d_h;            // [B, gates units]; d_h may be null
};

// All steps of a layer: the arguments of rnn_backward, which accumext/decoder/_operators.py
// describes. They are contiguous but for dh and dc.
template <typename T>
struct LayerGradient {
  CellKind kind;
  int64_t steps, batch, units, gates;
  const T *d_out, *pre, *h, *c;
  const bool* active;
  const T *gate, *limit;
  Matrix<T> dh, dc;
  T *d_x, *d_h;

  ACCUMEXT_HOST_DEVICE Gradient<T> step(int64_t t) const {
    const int64_t row = t * batch;
    const int64_t before = gates == 1 ? batch : 0;  // a plain RNN reads its state after the step
    return {.units = units,
            .d_out = rows(d_out, row, units),
            .pre = rows(pre, row, 4 * units),
            .h = rows(h, row + before, units),
            .c = rows(c, row, units),
            .c_next = rows(c, row + batch, units),
            .active = {active == nullptr ? nullptr : active + row, 1},
            .d_x = rows(d_x, row, gates * units),
            .d_h = rows(d_h, row, gates * units)};
  }

  // The factor and bound of the gradient from step t to the state before it.
  ACCUMEXT_HOST_DEVICE Carry<T> carry(int64_t t) const {
    return {{gate == nullptr ? nullptr : gate + t * batch, 1}, limit};
  }

 private:
  template <typename V>
  ACCUMEXT_HOST_DEVICE static Matrix<V> rows(V* data, int64_t row, int64_t width) {
    return {data == nullptr ? nullptr : data + row * width, width, 1};
  }
};

// All that a step backward reads of one unit of a row, except dh and dc.
template <typename T>
struct UnitBefore {
  bool active = false;
  T d_out, pre[4], h, c, c_next;
};

template <typename T, CellKind kKind>
__device__ UnitBefore<T> unit_before(const Gradient<T>& call, int64_t row, int64_t unit) {
  UnitBefore<T> of{};
  if (!is_live(call.active, row)) return of;
  of.active = true;
  of.d_out = *call.d_out.at(row, unit);
  if constexpr (kGates<kKind> > 1) {
    for (int i = 0; i < 4; ++i) of.pre[i] = *call.pre.at(row, i * call.units + unit);
  }
  if constexpr (kKind == CellKind::kLstm) {
    of.c = *call.c.at(row, unit);
    of.c_next = *call.c_next.at(row, unit);
  } else {
    of.h = *call.h.at(row, unit);
  }
  return of;
}

// A unit's step backward. dh and dc become the gradients of the state before it, without the
// product with weight_hh; inactive rows keep them. leave(gate, d_x, d_h) gets the gates' gradients.
template <CellKind kKind, typename T, typename Leave>
__device__ void unit_backward(const UnitBefore<T>& of, T& dh, T& dc, const Leave& leave) {
  if (!of.active) {
    for (int gate = 0; gate < kGates<kKind>; ++gate) leave(gate, T(0), T(0));
    return;
  }
  const T up = dh + of.d_out;
  if constexpr (kKind == CellKind::kGru) {
    const T r = sigmoid(of.pre[0]);
    const T n_h = of.pre[3];
    const T n = std::tanh(of.pre[2] + r * n_h);
    const auto d = gru_gradient(up, r, sigmoid(of.pre[1]), n, n_h, of.h);
    leave(0, d.r_pre, d.r_pre);
    leave(1, d.z_pre, d.z_pre);
    leave(2, d.n_x, d.n_h);
    dh = d.h;
  } else if constexpr (kKind == CellKind::kLstm) {
    const auto d =
        lstm_gradient(up, dc, sigmoid(of.pre[0]), sigmoid(of.pre[1]), std::tanh(of.pre[2]),
                      sigmoid(of.pre[3]), of.c, std::tanh(of.c_next));
    leave(0, d.i_pre, d.i_pre);
    leave(1, d.f_pre, d.f_pre);
    leave(2, d.g_pre, d.g_pre);
    leave(3, d.o_pre, d.o_pre);
    dc = d.c;
    dh = T(0);
  } else {
    T d;
    if constexpr (kKind == CellKind::kRnnTanh) {
      d = up * (T(1) - of.h * of.h);
    } else {
      d = up * (of.h > 0 ? T(1) : T(0));
    }
    leave(0, d, d);
    dh = T(0);
  }
}

// One step backward: the gradients of the gates, 0 in rows that are not active. dh and dc, which do
// not change in those rows, become the gradients of the state before the step, without the product
// with weight_hh.
//
//   grid    rows times blocks_per_row    block   kBlockSize threads, one per unit of a row
//   reads   dh, product and d_out, T, [B, units]; pre, [B, 4 units], not of a plain RNN; h,
//           [B, units]; c, c_next and dc of an LSTM, [B, units]; active, bool, and gate, T, [B];
//           limit
//   writes  d_x and d_h, T, [B, gates units], d_h unless null; operand, any dtype, the same; dh,
//           and dc of an LSTM, [B, units]
//   So 8 T of a GRU's unit are read and 7 written with d_h; 10 and 6 of an LSTM's, which needs no
//   h; 4 and 2 of an RNN's; and the copy of d_h, or of d_x, as the product reads it.
template <typename T, CellKind kKind>
__global__ void __launch_bounds__(kBlockSize)
    rnn_gradient_kernel(Gradient<T> call, Passing<T> passing, AnyMatrix operand) {
  const auto [row, unit] = Unit(call.units);
  if (unit >= call.units) return;
  T dh = passed_dh(passing, row, unit);
  T dc = T(0);
  if constexpr (kKind == CellKind::kLstm) dc = passed_dc(passing, row, unit);
  unit_backward<kKind>(unit_before<T, kKind>(call, row, unit), dh, dc, [&](int gate, T d_x, T d_h) {
    const int64_t column = gate * call.units + unit;
    *call.d_x.at(row, column) = d_x;
    if (call.d_h.data != nullptr) *call.d_h.at(row, column) = d_h;
    put(operand, row, column, d_h);
  });
  *passing.dh.at(row, unit) = dh;
  if constexpr (kKind == CellKind::kLstm) *passing.dc.at(row, unit) = dc;
}

// Completes dh and dc after the first step: they become the gradients of the state before it.
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
  *passing.dc.at(row, unit) = passed_dc(passing, row, unit);
}

}  // namespace accumext::cuda
