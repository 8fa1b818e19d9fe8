// How the launchers of a recurrent layer's kernels choose the kind of cell, and launch.
#pragma once

#include <type_traits>

#include "cuda/decoder/matrix_arguments.h"
#include "cuda/decoder/rnn_units.cuh"
#include "cuda/launch.h"

namespace accumext::cuda {

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
void launch_units(void (*kernel)(Call), const Call& call, int64_t batch, int32_t device) {
  if (batch == 0 || call.units == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t blocks = batch * blocks_per_row(call.units);
  kernel<<<blocks, kBlockSize, 0, current_stream(device)>>>(call);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace accumext::cuda
