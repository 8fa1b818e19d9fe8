#include "cuda/decoder/persistent_steps.cuh"

namespace accumext::cuda {

template PersistentKernel persistent_kernel<__nv_bfloat16, 8>();
template PersistentKernel persistent_kernel<__half, 8>();

}  // namespace accumext::cuda
