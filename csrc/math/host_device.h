// Element arithmetic is compiled by nvcc for the host and the device, and by g++ once for each
// instruction set. It is always inline: the linker would keep one set's copy for all of them.
#pragma once

#ifdef __CUDACC__
#define ACCUMEXT_HOST_DEVICE __host__ __device__
#else
#define ACCUMEXT_HOST_DEVICE [[gnu::always_inline]]
#endif
