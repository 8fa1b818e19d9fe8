// Tables that are too long for a kernel's arguments: they stay in device memory from one call to
// the next.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace accumext::cuda {

// Device memory with these bytes, for a kernel that is enqueued next on this stream of the current
// device. Nothing is uploaded if an earlier call of the stream had the same bytes; in a capture, if
// a call of any capture had them. The memory is not written again while the caller holds it, nor
// ever if the stream is being captured: a graph may replay the kernel.
std::shared_ptr<const std::byte> uploaded(const std::vector<std::byte>& bytes, int32_t device,
                                          cudaStream_t stream);

}  // namespace accumext::cuda
