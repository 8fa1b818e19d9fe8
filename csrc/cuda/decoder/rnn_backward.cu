#include <optional>

#include "cuda/decoder/matmul.h"
#include "cuda/decoder/matrix_arguments.h"
#include "cuda/decoder/rnn_gradient.cuh"
#include "cuda/decoder/rnn_launch.h"

namespace accumext::cuda {
namespace {

// Two launches a step, and one behind the last.
template <typename T>
void rnn_backward(CellKind kind, const Tensor& d_out, const std::optional<Tensor>& pre,
                  const Tensor& h, const std::optional<Tensor>& c,
                  const std::optional<Tensor>& live, const std::optional<Tensor>& gate,
                  const std::optional<Tensor>& limit, const Tensor& weight, const Tensor& dh,
                  const std::optional<Tensor>& dc, const Tensor& d_x,
                  const std::optional<Tensor>& d_h) {
  const int64_t steps = d_out.size(0);
  const int64_t batch = d_out.size(1);
  const int64_t units = d_out.size(2);
  const int64_t gates = gate_count(kind);
  const int64_t state = batch * units;
  const bool lstm = kind == CellKind::kLstm;
  const Views views(d_out);
  require(gates == 1 || pre);
  require(lstm == c.has_value() && lstm == dc.has_value());
  require((kind == CellKind::kGru) == d_h.has_value());
  require(multiplies<T>(float_dtype(weight)));
  views.operand(weight, units, gates * units);
  const auto rows_of = [&](auto* data, int64_t row, int64_t width) {
    return Matrix{data == nullptr ? nullptr : data + row * width, width, 1};
  };
  const auto* d_outs = views.dense<const T>(d_out, steps * state);
  const auto* pres = views.dense<const T>(pre, steps * state * 4);
  const auto* hs = views.dense<const T>(h, (steps + 1) * state);
  const auto* cs = views.dense<const T>(c, (steps + 1) * state);
  const auto* lives = views.dense<const bool>(live, steps * batch);
  const auto* gate_factors = views.dense<const T>(gate, steps * batch);
  T* d_xs = views.dense<T>(d_x, steps * state * gates);
  T* d_hs = views.dense<T>(d_h, steps * state * gates);
  Passing<T> passing{.dh = views.matrix<T>(dh, batch, units),
                     .dc = views.matrix<T>(dc, batch, units),
                     .product = {},
                     .gate = {},
                     .limit = views.dense<const T>(limit, 1)};
  if (steps * state == 0) return;

  const Queue queue(views.device_index());
  const Tensor operand = queue.empty({batch, gates * units}, weight.scalar_type());
  const Tensor product = queue.empty({batch, units}, dtype_of<T>());
  const Tensor transposed = torch::stable::transpose(weight, 0, 1);
  const auto kernel = with_kind(kind, [](auto constant) -> void (*)(Gradient<T>) {
    return rnn_gradient_kernel<T, constant()>;
  });
  const int64_t before = gates == 1 ? batch : 0;  // a plain RNN reads its state after the step
  for (int64_t t = steps - 1; t >= 0; --t) {
    const int64_t row = t * batch;
    const Gradient<T> call{
        .units = units,
        .passing = passing,
        .d_out = rows_of(d_outs, row, units),
        .pre = rows_of(pres, row, 4 * units),
        .h = rows_of(hs, row + before, units),
        .c = rows_of(cs, row, units),
        .c_next = rows_of(cs, row + batch, units),
        .live = {lives == nullptr ? nullptr : lives + row, 1},
        .d_x = rows_of(d_xs, row, gates * units),
        .d_h = rows_of(d_hs, row, gates * units),
        .operand = views.any_matrix(operand, batch, gates * units),
    };
    launch_units(queue, kernel, batch, units, call);
    matmul(operand, transposed, product);
    passing.product = views.matrix<const T>(product, batch, units);
    passing.gate = {gate_factors == nullptr ? nullptr : gate_factors + row, 1};
  }
  launch_units(queue, rnn_pass_on_kernel<T>, batch, units, units, passing);
}

void rnn_backward_cuda(int64_t kind, Tensor d_out, std::optional<Tensor> pre, Tensor h,
                       std::optional<Tensor> c, std::optional<Tensor> live,
                       std::optional<Tensor> gate, std::optional<Tensor> limit, Tensor weight,
                       Tensor dh, std::optional<Tensor> dc, Tensor d_x, std::optional<Tensor> d_h) {
  require(d_out.dim() == 3);
  const auto run = [&](auto type) {
    rnn_backward<decltype(type)>(cell_kind(kind), d_out, pre, h, c, live, gate, limit, weight, dh,
                                 dc, d_x, d_h);
  };
  float_dtype(d_out) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("rnn_backward", accumext::boxed<accumext::cuda::rnn_backward_cuda>);
}
