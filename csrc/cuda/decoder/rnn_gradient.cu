#include <optional>

#include "cuda/decoder/rnn_gradient.cuh"
#include "cuda/decoder/rnn_launch.h"

namespace accumext::cuda {
namespace {

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
    launch_units(rnn_gradient_kernel<T, kKind>, call, batch, views.device_index());
  };
  with_kind(kind, [&](auto constant) {
    float_dtype(dh) == Dtype::kDouble ? run(double(), constant) : run(float(), constant);
  });
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("rnn_gradient", accumext::boxed<accumext::cuda::rnn_gradient_cuda>);
}
