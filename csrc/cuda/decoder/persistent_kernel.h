// The persistent kernels: of a dtype of operands, and of batches of so many tiles of 8 rows.
#pragma once

#include <cstddef>

#include "cuda/decoder/persistent_plan.h"

namespace accumext::cuda {

using PersistentKernel = void (*)(PersistentCall, PersistentPlan, std::byte*);

// Each has a file of its own, persistent_steps_<dtype>_<tiles>.cu: nvcc compiles no two kernels of
// one file at the same time.
template <typename T, int kColumnTiles>
PersistentKernel persistent_kernel();

}  // namespace accumext::cuda
