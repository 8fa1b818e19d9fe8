#include <optional>

#include "cuda/decoder/rnn_advance.cuh"
#include "cuda/decoder/rnn_launch.h"

namespace accumext::cuda {
namespace {

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
    launch_units(rnn_advance_kernel<T, kKind>, call, batch, views.device_index());
  };
  with_kind(kind, [&](auto constant) {
    float_dtype(h) == Dtype::kDouble ? run(double(), constant) : run(float(), constant);
  });
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("rnn_advance", accumext::boxed<accumext::cuda::rnn_advance_cuda>);
}
