#include <optional>
#include <type_traits>

#include "cuda/decoder/matmul.h"
#include "cuda/decoder/matrix_arguments.h"
#include "cuda/decoder/rnn_gradient.cuh"
#include "cuda/decoder/rnn_launch.h"
#include "cuda/decoder/rnn_through_time.cuh"

namespace accumext::cuda {
namespace {

// Uses one launch for all steps, if they fit and the weight has half precision.
bool at_once(const Queue& queue, const LayerGradient<float>& call, const AnyMatrix& weight) {
  const bool half = weight.dtype == Dtype::kHalf;
  if (!half && weight.dtype != Dtype::kBFloat16) return false;
  const auto kernel = [&](int tiles) {
    return half ? rnn_through_time_kernel_of<__half>(tiles)
                : rnn_through_time_kernel_of<__nv_bfloat16>(tiles);
  };
  const ThroughTimePlan plan =
      through_time_plan(call.batch, call.units, call.gates,
                        [&](int tiles) { return queue.limits(kernel(tiles), kBlockSize); });
  if (plan.blocks == 0) return false;
  const Tensor memory = queue.empty({plan.scratch_bytes}, torch::headeronly::ScalarType::Byte);
  auto* const scratch = static_cast<std::byte*>(memory.data_ptr());
  queue.clear(scratch, plan.scratch_bytes);
  queue.launch_together(kernel(plan.tiles), plan.blocks, kBlockSize, plan.shared_bytes, call,
                        weight, plan, scratch);
  return true;
}

// Two launches per step, and one after the last step.
template <typename T>
void step_by_step(const Queue& queue, const Views& views, const LayerGradient<T>& call,
                  const Tensor& weight) {
  const int64_t batch = call.batch, units = call.units, gates = call.gates;
  const Tensor operand = queue.empty({batch, gates * units}, weight.scalar_type());
  const Tensor product = queue.empty({batch, units}, dtype_of<T>());
  const Tensor transposed = torch::stable::transpose(weight, 0, 1);
  const auto kernel =
      with_kind(call.kind, [](auto constant) -> void (*)(Gradient<T>, Passing<T>, AnyMatrix) {
        return rnn_gradient_kernel<T, constant()>;
      });
  Passing<T> passing{.dh = call.dh, .dc = call.dc, .product = {}, .carry = {}};
  for (int64_t t = call.steps - 1; t >= 0; --t) {
    launch_units(queue, kernel, batch, units, call.step(t), passing,
                 views.any_matrix(operand, batch, gates * units));
    matmul(operand, transposed, product);
    passing.product = views.matrix<const T>(product, batch, units);
    passing.carry = call.carry(t);
  }
  launch_units(queue, rnn_pass_on_kernel<T>, batch, units, units, passing);
}

template <typename T>
void rnn_backward(CellKind kind, const Tensor& d_out, const std::optional<Tensor>& pre,
                  const Tensor& h, const std::optional<Tensor>& c,
                  const std::optional<Tensor>& active, const std::optional<Tensor>& gate,
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
  const AnyMatrix factor = views.operand(weight, units, gates * units);
  const LayerGradient<T> call{.kind = kind,
                              .steps = steps,
                              .batch = batch,
                              .units = units,
                              .gates = gates,
                              .d_out = views.dense<const T>(d_out, steps * state),
                              .pre = views.dense<const T>(pre, steps * state * 4),
                              .h = views.dense<const T>(h, (steps + 1) * state),
                              .c = views.dense<const T>(c, (steps + 1) * state),
                              .active = views.dense<const bool>(active, steps * batch),
                              .gate = views.dense<const T>(gate, steps * batch),
                              .limit = views.dense<const T>(limit, 1),
                              .dh = views.matrix<T>(dh, batch, units),
                              .dc = views.matrix<T>(dc, batch, units),
                              .d_x = views.dense<T>(d_x, steps * state * gates),
                              .d_h = views.dense<T>(d_h, steps * state * gates)};
  if (steps * state == 0) return;
  const Queue queue(views.device_index());
  if constexpr (std::is_same_v<T, float>) {
    if (at_once(queue, call, factor)) return;
  }
  step_by_step(queue, views, call, weight);
}

void rnn_backward_cuda(int64_t kind, Tensor d_out, std::optional<Tensor> pre, Tensor h,
                       std::optional<Tensor> c, std::optional<Tensor> active,
                       std::optional<Tensor> gate, std::optional<Tensor> limit, Tensor weight,
                       Tensor dh, std::optional<Tensor> dc, Tensor d_x, std::optional<Tensor> d_h) {
  require(d_out.dim() == 3);
  const auto run = [&](auto type) {
    rnn_backward<decltype(type)>(cell_kind(kind), d_out, pre, h, c, active, gate, limit, weight, dh,
                                 dc, d_x, d_h);
  };
  float_dtype(d_out) == Dtype::kDouble ? run(double()) : run(float());
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("rnn_backward", accumext::boxed<accumext::cuda::rnn_backward_cuda>);
}
