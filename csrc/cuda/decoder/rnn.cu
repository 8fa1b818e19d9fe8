#include <optional>
#include <type_traits>

#include "cuda/decoder/matrix_arguments.h"
#include "cuda/decoder/rnn.cuh"
#include "cuda/launch.h"

namespace accumext::cuda {
namespace {

// f(a constant of this kind)
template <typename F>
void with_kind(int64_t kind, const F& f) {
  switch (kind) {
    case static_cast<int64_t>(CellKind::kGru):
      return f(std::integral_constant<CellKind, CellKind::kGru>());
    case static_cast<int64_t>(CellKind::kLstm):
      return f(std::integral_constant<CellKind, CellKind::kLstm>());
    case static_cast<int64_t>(CellKind::kRnnTanh):
      return f(std::integral_constant<CellKind, CellKind::kRnnTanh>());
    case static_cast<int64_t>(CellKind::kRnnRelu):
      return f(std::integral_constant<CellKind, CellKind::kRnnRelu>());
    default:
      require(false);
  }
}

template <typename Call>
void launch(void (*kernel)(Call), const Call& call, int64_t batch, int32_t device) {
  if (batch == 0 || call.units == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t blocks = batch * blocks_per_row(call.units);
  kernel<<<blocks, kBlockSize, 0, current_stream(device)>>>(call);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void rnn_advance_cuda(int64_t kind, Tensor from_x, Tensor from_h, std::optional<Tensor> live,
                      Tensor h, std::optional<Tensor> c, Tensor h_next,
                      std::optional<Tensor> c_next) {
  const Views views(h);
  require(h.dim() == 2);
  const int64_t batch = h.size(0);
  const int64_t units = h.size(1);
  const auto run = [&](auto type, auto constant) {
    using T = decltype(type);
    constexpr CellKind kKind = constant();
    constexpr bool kLstm = kKind == CellKind::kLstm;
    require(!kLstm || (c && c_next));
    const int64_t rows = gate_count(kKind) * units;
    Advance<T> call{.units = units,
                    .from_x = views.matrix<const T>(from_x, batch, rows),
                    .from_h = views.matrix<const T>(from_h, batch, rows),
                    .live = views.column<const bool>(live, batch),
                    .h = views.matrix<const T>(h, batch, units),
                    .c = {},
                    .h_next = views.matrix<T>(h_next, batch, units),
                    .c_next = {}};
    if constexpr (kLstm) {
      call.c = views.matrix<const T>(c, batch, units);
      call.c_next = views.matrix<T>(c_next, batch, units);
    }
    launch(rnn_advance_kernel<T, kKind>, call, batch, views.device_index());
  };
  with_kind(kind, [&](auto constant) {
    float_dtype(h) == Dtype::kDouble ? run(double(), constant) : run(float(), constant);
  });
}

void rnn_gradient_cuda(int64_t kind, Tensor d_out, std::optional<Tensor> pre, Tensor h,
                       std::optional<Tensor> c, std::optional<Tensor> c_next,
                       std::optional<Tensor> live, Tensor dh, std::optional<Tensor> dc, Tensor d_x,
                       std::optional<Tensor> d_h) {
  const Views views(dh);
  require(dh.dim() == 2);
  const int64_t batch = dh.size(0);
  const int64_t units = dh.size(1);
  const auto run = [&](auto type, auto constant) {
    using T = decltype(type);
    constexpr CellKind kKind = constant();
    constexpr bool kLstm = kKind == CellKind::kLstm;
    require(gate_count(kKind) == 1 || pre);
    require(!kLstm || (c && c_next && dc));
    const int64_t rows = gate_count(kKind) * units;
    Gradient<T> call{.units = units,
                     .d_out = views.matrix<const T>(d_out, batch, units),
                     .pre = {},
                     .h = views.matrix<const T>(h, batch, units),
                     .c = {},
                     .c_next = {},
                     .live = views.column<const bool>(live, batch),
                     .dh = views.matrix<T>(dh, batch, units),
                     .dc = {},
                     .d_x = views.matrix<T>(d_x, batch, rows),
                     .d_h = views.matrix<T>(d_h, batch, rows)};
    if constexpr (gate_count(kKind) > 1) call.pre = views.matrix<const T>(pre, batch, 4 * units);
    if constexpr (kLstm) {
      call.c = views.matrix<const T>(c, batch, units);
      call.c_next = views.matrix<const T>(c_next, batch, units);
      call.dc = views.matrix<T>(dc, batch, units);
    }
    launch(rnn_gradient_kernel<T, kKind>, call, batch, views.device_index());
  };
  with_kind(kind, [&](auto constant) {
    float_dtype(dh) == Dtype::kDouble ? run(double(), constant) : run(float(), constant);
  });
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("rnn_advance", accumext::boxed<accumext::cuda::rnn_advance_cuda>);
  m.impl("rnn_gradient", accumext::boxed<accumext::cuda::rnn_gradient_cuda>);
}
