#include "cuda/decoder/persistent_steps.cuh"

namespace accumext::cuda {

template PersistentKernel persistent_kernel<__nv_bfloat16, 2>();
template PersistentKernel persistent_kernel<__half, 2>();

}  // namespace accumext::cuda
