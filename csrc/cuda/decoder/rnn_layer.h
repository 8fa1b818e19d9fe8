// One layer of a recurrent decoder on a GPU, a few steps at a time.
#pragma once

#include <optional>

#include "cuda/decoder/matmul.h"
#include "cuda/decoder/matrix_arguments.h"
#include "cuda/decoder/rnn_advance.cuh"
#include "cuda/decoder/rnn_launch.h"

namespace accumext::cuda {

// The copies of a layer's outputs for the layer above or the head.
template <typename T>
struct Outputs {
  AnyMatrix rows;              // [n B, H], any dtype; or null
  const bool* kept = nullptr;  // [n, any, B, H]: units that dropout keeps; or null: all
  int64_t kept_stride = 0;     // from one step to the next
  T scale = 1;                 // of the units that are kept
};

template <typename T>
class Layer {
 public:
  Layer(const Queue& queue, const Views& views, CellKind kind, const Tensor& weight_ih,
        const Tensor& weight_hh, const Tensor& bias_ih, const Tensor& bias_hh,  // may be empty
        const Tensor& h, const std::optional<Tensor>& c,  // [T + 1, B, H]: before and after steps
        const bool* active)                               // [T, B], or null: all rows are
      : queue_(queue),
        kernel_(with_kind(kind,
                          [](auto constant) -> void (*)(Advance<T>) {
                            return rnn_advance_kernel<T, constant()>;
                          })),
        batch_(h.size(1)),
        units_(h.size(2)),
        rows_(gate_count(kind) * units_),
        h_(views.dense<T>(h, h.size(0) * batch_ * units_)),
        c_(views.dense<T>(c, h.size(0) * batch_ * units_)),
        active_(active),
        states_(h),
        weight_ih_(torch::stable::transpose(weight_ih, 0, 1)),
        weight_hh_(torch::stable::transpose(weight_hh, 0, 1)),
        operand_(queue.empty({batch_, units_}, weight_hh.scalar_type())),
        from_h_(queue.empty({batch_, rows_}, dtype_of<T>())) {
    require(weight_ih.dim() == 2 && (kind == CellKind::kLstm) == c.has_value());
    views.operand(weight_ih, rows_, weight_ih.size(1));
    views.operand(weight_hh, rows_, units_);
    require(multiplies<T>(float_dtype(weight_ih)) && multiplies<T>(float_dtype(weight_hh)));
    const auto bias = [&](const Tensor& tensor) {
      return tensor.numel() == 0 ? Column<const T>{} : views.column<const T>(tensor, rows_);
    };
    call_.units = units_;
    call_.from_h = views.matrix<const T>(from_h_, batch_, rows_);
    call_.bias_x = bias(bias_ih);
    call_.bias_h = bias(bias_hh);
    call_.operand = views.any_matrix(operand_, batch_, units_);
  }

  int64_t inputs() const { return weight_ih_.size(0); }

  // Begins with the state before a step.
  void start(int64_t step) {
    torch::stable::copy_(operand_, torch::stable::select(states_, 0, step));
  }

  // Runs the steps from `begin` on with inputs [n B, inputs()]; from_x, [n B, gates H], is memory
  // for their products. Two launches per step, and one product of all inputs.
  void run(int64_t begin, const Tensor& inputs, const Tensor& from_x, const Outputs<T>& outputs) {
    matmul(inputs, weight_ih_, from_x);
    const T* products = static_cast<const T*>(from_x.data_ptr());
    const int64_t steps = from_x.size(0) / batch_;
    for (int64_t i = 0; i < steps; ++i) {
      const int64_t row = (begin + i) * batch_;
      matmul(operand_, weight_hh_, from_h_);
      call_.from_x = {products + i * batch_ * rows_, rows_, 1};
      call_.active = {active_ == nullptr ? nullptr : active_ + row, 1};
      call_.h = at<const T>(h_, row);
      call_.h_next = at(h_, row + batch_);
      if (c_ != nullptr) {
        call_.c = at<const T>(c_, row);
        call_.c_next = at(c_, row + batch_);
      }
      call_.output = outputs.rows.from_row(i * batch_);
      if (outputs.kept != nullptr) {
        call_.kept = {outputs.kept + i * outputs.kept_stride, units_, 1};
      }
      call_.scale = outputs.scale;
      launch_units(queue_, kernel_, batch_, units_, call_);
    }
  }

 private:
  // Rows of states, [B, H].
  template <typename E = T>
  Matrix<E> at(T* states, int64_t row) const {
    return {states + row * units_, units_, 1};
  }

  const Queue& queue_;
  void (*kernel_)(Advance<T>);
  int64_t batch_, units_;
  int64_t rows_;  // gates H
  T *h_, *c_;
  const bool* active_;
  Tensor states_;
  Tensor weight_ih_, weight_hh_;  // transposed: [inputs, gates H], [H, gates H]
  Tensor operand_;                // [B, H]: the state as weight_hh reads it
  Tensor from_h_;                 // [B, gates H]
  Advance<T> call_{};
};

}  // namespace accumext::cuda
