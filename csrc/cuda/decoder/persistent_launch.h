// The persistent kernel's launcher: a window of decoder steps without a launch per step.
#pragma once

#include <cstdint>

#include "cuda/decoder/persistent_call.h"

namespace accumext::cuda {

// Whether the kernel takes this window on this device. Nothing is launched, and nothing waits.
bool persistent_fits(const PersistentCall& call, int32_t device);

// Runs the window, which must fit, on the current stream of the device: scratch memory is taken
// from torch's allocator, its counters are set to 0, and one kernel is launched. A CUDA graph may
// capture it.
void launch_persistent(const PersistentCall& call, int32_t device);

}  // namespace accumext::cuda
