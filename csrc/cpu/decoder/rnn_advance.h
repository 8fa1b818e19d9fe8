// One layer of a recurrent cell, one step at a time.
#pragma once

#include <algorithm>
#include <vector>

#include "common/cell_kind.h"
#include "cpu/decoder/skinny_matmul.h"
#include "cpu/team.h"

namespace accumext::cpu {

// The units of a piece.
constexpr int64_t kUnits = 4 * kRowBlock;

template <typename T>
class Layer {
 public:
  // Biases may be empty.
  Layer(CellKind kind, const Tensor& weight_ih, const Tensor& weight_hh, const Tensor& bias_ih,
        const Tensor& bias_hh, int64_t batch)
      : kind_(kind),
        units_(weight_hh.size(1)),
        batch_(batch),
        width_(padded(batch)),
        from_x_(weight_ih, bias(bias_ih), batch),
        from_h_(weight_hh, bias(bias_hh), batch),
        x_part_(from_x_.rows * width_),
        h_part_(from_h_.rows * width_),
        h_(units_ * width_),
        c_(units_ * width_),
        next_h_(units_ * width_),
        next_c_(units_ * width_) {
    const int64_t rows = gate_count(kind) * units_;
    require(from_x_.rows == rows && from_h_.rows == rows);
    require(bias_ih.numel() == 0 || bias_ih.numel() == rows);
    require(bias_hh.numel() == 0 || bias_hh.numel() == rows);
    // The padding columns behind the batch are computed, too.
    std::fill_n(x_part_.get(), rows * width_, T(0));
    std::fill_n(h_part_.get(), rows * width_, T(0));
  }

  int64_t units() const { return units_; }
  int64_t inputs() const { return from_x_.depth; }

  // Sets the state before the next step: [batch, units] each; c of an LSTM.
  void start(const T* h, const T* c) {
    transpose(h, h_);
    if (kind_ == CellKind::kLstm) transpose(c, c_);
  }

  // The current state, [units, padded(batch)].
  const T* h() const { return h_.get(); }

  // A step on x [inputs, padded(batch)]; rows that are not active (null: all are) keep their state.
  // The new state also goes to h [batch, units], and c of an LSTM; pre-activations, if they are
  // wanted, to pre [batch, kPreActivations * units].
  void step(Team& team, const T* x, const bool* active, T* h, T* c, T* pre) {
    from_x_.take(x, width_, batch_);
    from_h_.take(h_.get(), width_, batch_);
    team.share(units_, kUnits, [&](int64_t begin, int64_t end, int64_t) {
      advance(begin, end);
      keep_ended(active, begin, end);
      untranspose(next_h_.get(), begin, end, h, units_);
      if (kind_ == CellKind::kLstm) untranspose(next_c_.get(), begin, end, c, units_);
      for (int64_t g = 0; pre != nullptr && g < kPreActivations; ++g) {
        const T* from =
            g < gate_count(kind_) ? &x_part_[g * units_ * width_] : &h_part_[2 * units_ * width_];
        untranspose(from, begin, end, pre + g * units_, kPreActivations * units_);
      }
    });
    std::swap(h_, next_h_);
    std::swap(c_, next_c_);
  }

 private:
  static const T* bias(const Tensor& tensor) {
    return tensor.numel() == 0 ? nullptr : elements<T>(tensor);
  }

  void advance(int64_t begin, int64_t end) {
    const int64_t gates = gate_count(kind_);
    Gates<T> units{};
    units.size = (end - begin) * width_;
    for (int64_t g = 0; g < gates; ++g) {
      const int64_t first = g * units_ + begin;
      from_x_.run(first, first + end - begin, x_part_.get(), width_);
      from_h_.run(first, first + end - begin, h_part_.get(), width_);
      T* from_x = x_part_.get() + first * width_;
      const T* from_h = h_part_.get() + first * width_;
      units.pre[g] = from_x;
      if (kind_ == CellKind::kGru && g == 2) {  // r multiplies only the part from h
        units.pre[3] = from_h;
      } else {
        for (int64_t i = 0; i < units.size; ++i) from_x[i] += from_h[i];
      }
    }
    units.h = h_.get() + begin * width_;
    units.c = c_.get() + begin * width_;
    decoder_kernels<T>().forward(kind_, units, next_h_.get() + begin * width_,
                                 next_c_.get() + begin * width_);
  }

  void keep_ended(const bool* active, int64_t begin, int64_t end) {
    if (active == nullptr) return;
    for (int64_t b = 0; b < batch_; ++b) {
      if (active[b]) continue;
      for (int64_t j = begin; j < end; ++j) {
        next_h_[j * width_ + b] = h_[j * width_ + b];
        if (kind_ == CellKind::kLstm) next_c_[j * width_ + b] = c_[j * width_ + b];
      }
    }
  }

  void transpose(const T* from, const Buffer<T>& to) const {
    for (int64_t j = 0; j < units_; ++j) {
      for (int64_t b = 0; b < batch_; ++b) to[j * width_ + b] = from[b * units_ + j];
      for (int64_t b = batch_; b < width_; ++b) to[j * width_ + b] = T(0);
    }
  }

  // Units [begin, end) of from [units, width], to the rows of the batch.
  void untranspose(const T* from, int64_t begin, int64_t end, T* to, int64_t stride) const {
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t j = begin; j < end; ++j) to[b * stride + j] = from[j * width_ + b];
    }
  }

  CellKind kind_;
  int64_t units_;
  int64_t batch_;
  int64_t width_;  // padded(batch)
  Skinny<T> from_x_, from_h_;
  Buffer<T> x_part_, h_part_;          // [gates * units, width]
  Buffer<T> h_, c_, next_h_, next_c_;  // [units, width]
};

}  // namespace accumext::cpu
