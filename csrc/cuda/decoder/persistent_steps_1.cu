#include "cuda/decoder/persistent_steps.cuh"

namespace accumext::cuda {

template PersistentKernel persistent_kernel<__nv_bfloat16, 1>();
template PersistentKernel persistent_kernel<__half, 1>();

}  // namespace accumext::cuda
