// The persistent kernel's launcher: a window of decoder steps without a launch per step.
#pragma once

#include "cuda/decoder/persistent_call.h"
#include "cuda/enqueue.h"

namespace accumext::cuda {

// Whether the kernel takes this window on the queue's device. Nothing is launched, nothing waits.
bool persistent_fits(const Queue& queue, const PersistentCall& call);

// Runs the window, which must fit: scratch memory is taken from torch's allocator, its counters
// become 0, and one kernel is launched. A CUDA graph may capture it.
void launch_persistent(const Queue& queue, const PersistentCall& call);

}  // namespace accumext::cuda
