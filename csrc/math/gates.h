// The recurrent cells, element by element, as torch.nn.GRUCell, LSTMCell and RNNCell define them:
// what follows the products with x and h, and its derivative. T is a number or a vector of them;
// sigmoid and tanh are applied by the caller.
#pragma once

#include "math/host_device.h"

namespace accumext {

enum class CellKind : int { kGru, kLstm, kRnnTanh, kRnnRelu };  // as in _rnn_weights.py: KINDS

// Blocks of H rows in weight_ih and weight_hh.
constexpr int gate_count(CellKind kind) {
  return kind == CellKind::kGru ? 3 : kind == CellKind::kLstm ? 4 : 1;
}

// h' = n + z (h - n), with r = sigmoid(r_pre), z = sigmoid(z_pre), n = tanh(n_x + r n_h).
template <typename T>
ACCUMEXT_HOST_DEVICE inline T gru_state(T z, T n, T h) {
  return n + z * (h - n);
}

template <typename T>
struct GruGradient {
  T r_pre, z_pre, n_x, n_h, h;  // n_x is that of n's whole argument; h without W_hh's part
};

template <typename T>
ACCUMEXT_HOST_DEVICE inline GruGradient<T> gru_gradient(T dh, T r, T z, T n, T n_h, T h) {
  GruGradient<T> d;
  d.n_x = dh * (T{} + 1 - z) * (T{} + 1 - n * n);
  d.n_h = d.n_x * r;
  d.r_pre = d.n_x * n_h * r * (T{} + 1 - r);
  d.z_pre = dh * (h - n) * z * (T{} + 1 - z);
  d.h = dh * z;
  return d;
}

// c' = f c + i g; h' = o tanh(c').
template <typename T>
ACCUMEXT_HOST_DEVICE inline T lstm_memory(T i, T f, T g, T c) {
  return f * c + i * g;
}

template <typename T>
struct LstmGradient {
  T i_pre, f_pre, g_pre, o_pre, c;
};

// dc is the gradient of c' without the part that comes through h'; tanh_c = tanh(c').
template <typename T>
ACCUMEXT_HOST_DEVICE inline LstmGradient<T> lstm_gradient(T dh, T dc, T i, T f, T g, T o, T c,
                                                          T tanh_c) {
  const T dc_all = dc + dh * o * (T{} + 1 - tanh_c * tanh_c);
  LstmGradient<T> d;
  d.i_pre = dc_all * g * i * (T{} + 1 - i);
  d.f_pre = dc_all * c * f * (T{} + 1 - f);
  d.g_pre = dc_all * i * (T{} + 1 - g * g);
  d.o_pre = dh * tanh_c * o * (T{} + 1 - o);
  d.c = dc_all * f;
  return d;
}

}  // namespace accumext
