// The persistent kernels: one per dtype of operands and number of 16-row tiles of the batch.
#pragma once

#include <cstddef>

#include "cuda/decoder/persistent_plan.h"

namespace accumext::cuda {

using PersistentKernel = void (*)(PersistentCall, PersistentPlan, std::byte*);

// Compiled in persistent_steps_<kTiles>.cu: nvcc compiles the kernels of one file one after
// the other, and all of them would keep every build waiting.
template <typename T, int kTiles>
PersistentKernel persistent_kernel();

}  // namespace accumext::cuda
