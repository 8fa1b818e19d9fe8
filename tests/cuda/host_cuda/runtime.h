// The calls of torch.cpp to the runtime besides those of CUDA.
#pragma once

#include <cuda_runtime.h>

namespace host_cuda {

// torch's current device, and its current stream of it: what follows is about these.
void use_device(int device);
int device();
cudaStream_t stream();
bool is_capturing();

// Memory of torch's allocator: in the order of the stream it is there, full of NaN, from `take` on
// until it is given back. Of a capture it stays with the graph.
void* take(size_t bytes);
void give_back(void* memory);

// Memory of the device, at which the race detector looks, if there is one, until it is forgotten.
void watch_tensor(const void* memory, size_t bytes);
void forget_tensor(const void* memory);

// Puts something on the stream that is neither a kernel nor memory.
void enqueue(Work work);

// At its end an operator has asked for its last error, and its work is done unless told otherwise.
void end_of_operator();

}  // namespace host_cuda
