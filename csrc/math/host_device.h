// Element arithmetic is compiled by g++ for the host and by nvcc for the host and the device.
#pragma once

#ifdef __CUDACC__
#define ACCUMEXT_HOST_DEVICE __host__ __device__
#else
#define ACCUMEXT_HOST_DEVICE
#endif
