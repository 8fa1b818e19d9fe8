#include "cuda/decoder/persistent_steps.cuh"

template accumext::cuda::PersistentKernel accumext::cuda::persistent_kernel<__half, 4>();
