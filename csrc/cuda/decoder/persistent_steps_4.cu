#include "cuda/decoder/persistent_steps.cuh"

namespace accumext::cuda {

template PersistentKernel persistent_kernel<__nv_bfloat16, 4>();
template PersistentKernel persistent_kernel<__half, 4>();

}  // namespace accumext::cuda
