#include <algorithm>
#include <limits>

#include "common/cell_kind.h"
#include "cpu/decoder/packed_matmul.h"
#include "cpu/team.h"

namespace accumext::cpu {
namespace {

// The arguments of the operator; accumext/decoder/_operators.py says what each is.
struct Call {
  CellKind kind;
  Tensor d_out;                  // [q, B, H]
  std::optional<Tensor> pre;     // [q, B, 4 H], not of a plain RNN
  Tensor h;                      // [q + 1, B, H]
  std::optional<Tensor> c;       // [q + 1, B, H] of an LSTM
  std::optional<Tensor> active;  // bool [q, B]
  std::optional<Tensor> gate;    // [q, B]
  std::optional<Tensor> limit;   // 0-dim
  Tensor weight;                 // [H, gates H]: weight_hh transposed
  Tensor dh;                     // [B, H]
  std::optional<Tensor> dc;      // [B, H]
  Tensor d_x;                    // [q, B, gates H]
  std::optional<Tensor> d_h;     // [q, B, gates H] of a GRU
};

template <typename T>
class Backward {
 public:
  explicit Backward(const Call& call)
      : call_(call),
        steps_(call.d_out.size(0)),
        batch_(call.d_out.size(1)),
        units_(call.d_out.size(2)),
        gates_(gate_count(call.kind)),
        to_h_(call.weight),
        product_(batch_ * units_),
        d_out_(elements<T>(call.d_out)),
        pre_(elements<T>(call.pre)),
        h_(elements<T>(call.h)),
        c_(elements<T>(call.c)),
        active_(call.active ? booleans(*call.active) : nullptr),
        gate_(elements<T>(call.gate)),
        limit_(call.limit ? *elements<T>(call.limit) : std::numeric_limits<T>::infinity()),
        dh_(elements<T>(call.dh)),
        dc_(call.dc ? elements<T>(*call.dc) : nullptr),
        d_x_(elements<T>(call.d_x)),
        d_h_(call.d_h ? elements<T>(*call.d_h) : nullptr) {
    const bool lstm = call.kind == CellKind::kLstm;
    const int64_t state = batch_ * units_;
    require(call.weight.dim() == 2);
    require(to_h_.columns == units_ && to_h_.depth == gates_ * units_);
    require(call.h.numel() == (steps_ + 1) * state && call.dh.numel() == state);
    require(lstm == call.c.has_value() && lstm == call.dc.has_value());
    require(!lstm || (call.c->numel() == (steps_ + 1) * state && call.dc->numel() == state));
    require(gates_ == 1 || (call.pre && call.pre->numel() == steps_ * state * 4));
    require(call.d_x.numel() == steps_ * state * gates_);
    require((call.kind == CellKind::kGru) == call.d_h.has_value());
    require(!call.d_h || call.d_h->numel() == steps_ * state * gates_);
    require(!call.active || call.active->numel() == steps_ * batch_);
    require(!call.gate || call.gate->numel() == steps_ * batch_);
  }

  void run() {
    Team::gather(std::max(batch_, to_h_.panels), [&](Team& team) {
      for (int64_t step = steps_ - 1; step >= 0; --step) {
        team.share(batch_, 1, [&](int64_t b, int64_t, int64_t) { through_cell(step, b); });
        to_h_.take((d_h_ != nullptr ? d_h_ : d_x_) + step * batch_ * to_h_.depth, batch_);
        team.share(to_h_.panels, to_h_.grain(), [&](int64_t begin, int64_t end, int64_t) {
          to_h_.run(begin, end, product_.get());
          const int64_t first = begin * kPanelColumns<T>;
          const int64_t last = std::min(end * kPanelColumns<T>, units_);
          for (int64_t b = 0; b < batch_; ++b) pass_on(step, b, first, last);
        });
      }
    });
  }

 private:
  // The part of dh that does not come through weight_hh, and the gradients of the pre-activations.
  void through_cell(int64_t step, int64_t b) {
    const int64_t row = step * batch_ + b;
    T* dh = dh_ + b * units_;
    T* dc = dc_ != nullptr ? dc_ + b * units_ : nullptr;
    T* d_x = d_x_ + row * gates_ * units_;
    T* d_h = d_h_ != nullptr ? d_h_ + row * gates_ * units_ : d_x;
    if (active_ != nullptr && !active_[row]) {  // an inactive row keeps its state
      std::fill_n(d_x, gates_ * units_, T(0));
      std::fill_n(d_h, gates_ * units_, T(0));
    } else {
      const T* d_out = d_out_ + row * units_;
      for (int64_t j = 0; j < units_; ++j) dh[j] += d_out[j];
      T* d_pre[4] = {d_x, d_x + units_, d_x + 2 * units_, d_x + 3 * units_};
      if (call_.kind == CellKind::kGru) d_pre[3] = d_h + 2 * units_;
      decoder_kernels<T>().backward(call_.kind, gates(row), dh, dc, d_pre);
      if (call_.kind == CellKind::kGru) std::copy_n(d_x, 2 * units_, d_h);
    }
  }

  Gates<T> gates(int64_t row) const {
    const int64_t state = batch_ * units_;
    Gates<T> gates{};
    gates.size = units_;
    for (int64_t g = 0; pre_ != nullptr && g < 4; ++g) {
      gates.pre[g] = pre_ + (row * 4 + g) * units_;
    }
    gates.h = h_ + row * units_ + (gates_ == 1 ? state : 0);
    if (c_ != nullptr) {
      gates.c = c_ + row * units_;
      gates.c_after = gates.c + state;
    }
    return gates;
  }

  // Adds the part through weight_hh, then applies the gate and the limit to the whole gradient.
  void pass_on(int64_t step, int64_t b, int64_t begin, int64_t end) {
    const int64_t row = step * batch_ + b;
    const T factor = gate_ != nullptr ? gate_[row] : T(1);
    const auto passed_on = [&](T x) {
      x = factor == T(0) ? T(0) : x * factor;
      return x > limit_ ? limit_ : x < -limit_ ? -limit_ : x;
    };
    T* dh = dh_ + b * units_;
    T* dc = dc_ != nullptr ? dc_ + b * units_ : nullptr;
    for (int64_t j = begin; j < end; ++j) dh[j] = passed_on(dh[j] + product_[b * units_ + j]);
    for (int64_t j = begin; dc != nullptr && j < end; ++j) dc[j] = passed_on(dc[j]);
  }

  const Call& call_;
  int64_t steps_, batch_, units_, gates_;
  PackedWeight<T> to_h_;
  Buffer<T> product_;  // [B, H]
  const T *d_out_, *pre_, *h_, *c_;
  const bool* active_;
  const T* gate_;
  T limit_;
  T *dh_, *dc_, *d_x_, *d_h_;
};

void rnn_backward_cpu(int64_t kind, Tensor d_out, std::optional<Tensor> pre, Tensor h,
                      std::optional<Tensor> c, std::optional<Tensor> active,
                      std::optional<Tensor> gate, std::optional<Tensor> limit, Tensor weight,
                      Tensor dh, std::optional<Tensor> dc, Tensor d_x, std::optional<Tensor> d_h) {
  const Call call{cell_kind(kind), d_out, pre, h, c, active, gate, limit, weight, dh, dc, d_x, d_h};
  require(d_out.dim() == 3);
  if (d_out.numel() == 0) return;
  if (float_dtype(d_out) == Dtype::kDouble) return Backward<double>(call).run();
  Backward<float>(call).run();
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("rnn_backward", accumext::boxed<accumext::cpu::rnn_backward_cpu>);
}
