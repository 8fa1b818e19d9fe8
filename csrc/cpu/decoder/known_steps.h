// Steps whose inputs are all known, one layer after the other: inputs are multiplied many rows at
// once, only the states step by step.
#pragma once

#include <algorithm>
#include <optional>

#include "common/decode_call.h"
#include "cpu/decoder/look_up.h"
#include "cpu/decoder/packed_matmul.h"

namespace accumext::cpu {

// The least number of steps for which packing a weight is worth its time.
constexpr int64_t kFewestKnownSteps = 4;

// Rows whose inputs are multiplied at once.
constexpr int64_t kInputRows = 512;

// The least number of gates' elements of a piece.
constexpr int64_t kGates = 1 << 12;

// A call that Decoding has checked.
template <typename T>
class KnownSteps {
 public:
  explicit KnownSteps(const DecodeCall& call)
      : call_(call),
        batch_(call.inputs.size(1)),
        units_(call.states[0].size(2)),
        width_(gate_count(call.kind) * units_),
        pre_width_(gate_count(call.kind) > 1 ? kPreActivations * units_ : units_),
        parts_(call.kind == CellKind::kLstm ? 2 : 1),
        active_(call.active ? booleans(*call.active) : nullptr),
        from_h_(batch_ * width_),
        row_grain_(std::max<int64_t>(1, kGates / width_)) {}

  void run() {
    const int64_t layers = static_cast<int64_t>(call_.cell.size()) / 4;
    const int64_t most = std::max<int64_t>(1, kInputRows / batch_);
    for (int64_t layer = 0; layer < layers; ++layer) {
      PackedWeight<T> weight(call_.cell[4 * layer + 1]);
      for (int64_t step = call_.begin; step < call_.end; step += most) {
        const int64_t count = std::min(most, call_.end - step);
        const Tensor x = layer == 0 ? embedded(step, count) : below(layer, step, count);
        Tensor pre = pre_activations(layer, step, count);
        add_matmul<T>(torch::stable::narrow(pre, 1, 0, width_), x,
                      torch::stable::transpose(call_.cell[4 * layer], 0, 1), /*overwrite=*/true);
        Team::gather(weight.panels, [&](Team& team) {
          for (int64_t i = 0; i < count; ++i) {
            advance(team, layer, weight, step + i, elements<T>(pre) + i * batch_ * pre_width_);
          }
        });
      }
    }
  }

 private:
  // The memory for the pre-activations of `count` steps, [count B, pre_width_].
  Tensor pre_activations(int64_t layer, int64_t step, int64_t count) const {
    const int64_t rows = count * batch_;
    if (!call_.pre) {
      return torch::stable::new_empty(call_.states[0], {rows, pre_width_}, kScalarType<T>);
    }
    Tensor all = torch::stable::view(*call_.pre, {-1, pre_width_});
    return torch::stable::narrow(all, 0, (layer * call_.inputs.size(0) + step) * batch_, rows);
  }

  // The inputs of `count` steps, [count B, E], in the dtype of the weight.
  Tensor embedded(int64_t step, int64_t count) const {
    const LookUp<T> inputs(call_);
    const Tensor x =
        torch::stable::new_empty(call_.states[0], {count * batch_, inputs.width}, kScalarType<T>);
    for (int64_t i = 0; i < count * batch_; ++i) {
      inputs.read(step * batch_ + i, elements<T>(x) + i * inputs.width);
    }
    return converted(x, float_dtype(call_.cell[0]));
  }

  // The inputs that a layer reads from the one below it, [count B, H].
  Tensor below(int64_t layer, int64_t step, int64_t count) const {
    Tensor states = call_.states[(layer - 1) * parts_];
    states = torch::stable::narrow(states, 0, step + 1, count);
    Tensor x = torch::stable::view(states, {count * batch_, units_});
    if (call_.between.mask) {
      x = torch::stable::clone(x);
      const int64_t masks = static_cast<int64_t>(call_.cell.size()) / 4 - 1;
      const int64_t size = batch_ * units_;
      for (int64_t i = 0; i < count; ++i) {
        const bool* mask = booleans(*call_.between.mask) + ((step + i) * masks + layer - 1) * size;
        T* of_step = elements<T>(x) + i * size;
        const T scale = static_cast<T>(call_.between.scale);
        for (int64_t j = 0; j < size; ++j) of_step[j] = mask[j] ? of_step[j] * scale : T(0);
      }
    }
    return converted(x, float_dtype(call_.cell[4 * layer]));
  }

  // One step of a layer from the products of its inputs, which become pre-activations.
  void advance(Team& team, int64_t layer, PackedWeight<T>& weight, int64_t step, T* pre) const {
    weight.take(state(layer, 0, step), batch_);
    team.share(weight.panels, weight.grain(),
               [&](int64_t begin, int64_t end, int64_t) { weight.run(begin, end, from_h_.get()); });
    team.share(batch_, row_grain_, [&](int64_t begin, int64_t end, int64_t) {
      for (int64_t b = begin; b < end; ++b) through_gates(layer, step, b, pre + b * pre_width_);
    });
  }

  // The state of row b after the step.
  void through_gates(int64_t layer, int64_t step, int64_t b, T* pre) const {
    const T* before[2] = {state(layer, 0, step) + b * units_, nullptr};
    T* after[2] = {state(layer, 0, step + 1) + b * units_, nullptr};
    if (parts_ == 2) {
      before[1] = state(layer, 1, step) + b * units_;
      after[1] = state(layer, 1, step + 1) + b * units_;
    }
    if (active_ != nullptr && !active_[step * batch_ + b]) {
      for (int64_t part = 0; part < parts_; ++part) {
        std::copy_n(before[part], units_, after[part]);
      }
      std::fill_n(pre, pre_width_, T(0));
      return;
    }
    T* from_h = from_h_.get() + b * width_;
    add_bias(call_.cell[4 * layer + 2], pre);
    add_bias(call_.cell[4 * layer + 3], from_h);
    // r of a GRU multiplies only the last part of from_h.
    const int64_t added = call_.kind == CellKind::kGru ? 2 * units_ : width_;
    for (int64_t k = 0; k < added; ++k) pre[k] += from_h[k];
    std::copy(from_h + added, from_h + width_, pre + width_);
    Gates<T> gates{};
    gates.size = units_;
    gates.h = before[0];
    gates.c = before[1];
    for (int64_t g = 0; g < pre_width_ / units_; ++g) gates.pre[g] = pre + g * units_;
    decoder_kernels<T>().forward(call_.kind, gates, after[0], after[1]);
  }

  void add_bias(const Tensor& bias, T* to) const {
    if (bias.numel() == 0) return;
    const T* from = elements<T>(bias);
    for (int64_t k = 0; k < width_; ++k) to[k] += from[k];
  }

  // h or c of a layer before a step, [B, H].
  T* state(int64_t layer, int64_t part, int64_t step) const {
    return elements<T>(call_.states[layer * parts_ + part]) + step * batch_ * units_;
  }

  const DecodeCall& call_;
  int64_t batch_, units_;
  int64_t width_;      // gates H
  int64_t pre_width_;  // of the pre-activations
  int64_t parts_;      // of a state
  const bool* active_;
  Buffer<T> from_h_;  // [B, gates H]
  int64_t row_grain_;
};

}  // namespace accumext::cpu
