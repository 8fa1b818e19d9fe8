// window_factors: the norm of the main gradients and all that follows from it, in two launches, or
// in one if the norm is given.
#include <optional>
#include <vector>

#include "cuda/launch.h"
#include "cuda/window_factors.cuh"

namespace accumext::cuda {
namespace {

// The tensor, or the given number if there is none.
Scalar scalar(Arguments& arguments, const std::optional<Tensor>& tensor, double otherwise) {
  return tensor ? arguments.scalar(tensor) : Scalar{.value = otherwise};
}

template <typename T>
T* three(Arguments& arguments, const Tensor& tensor, Dtype dtype) {
  require(arguments.dense_float(tensor) == dtype);
  require(tensor.dim() == 1 && tensor.size(0) == 3 && tensor.is_contiguous());
  return static_cast<T*>(tensor.data_ptr());
}

void window_factors_cuda(Tensor numbers, Tensor flags, TensorList main_grads,
                         std::optional<Tensor> norm, double unit, std::optional<Tensor> device_unit,
                         std::optional<Tensor> weight, std::optional<Tensor> scale,
                         std::optional<double> max_norm, bool normalised, bool checks_norm,
                         std::optional<Tensor> overflow, std::optional<Tensor> found_inf,
                         std::optional<Tensor> finite) {
  Arguments arguments;
  const std::vector<Span> spans = arguments.spans(main_grads, /*written=*/false);
  Closing closing{
      .unit = scalar(arguments, device_unit, unit),
      .weight = scalar(arguments, weight, 1.0),
      .scale = scalar(arguments, scale, 1.0),
      .overflow = scalar(arguments, overflow, 0.0),
      .found_inf = scalar(arguments, found_inf, 0.0),
      .finite = scalar(arguments, finite, 1.0),
      .rules = {.max_norm = max_norm.value_or(0.0),
                .clips = max_norm.has_value(),
                .weighted = weight.has_value(),
                .counted = finite.has_value(),
                .normalised = normalised,
                .checks_norm = checks_norm},
      .numbers = three<double>(arguments, numbers, Dtype::kDouble),
      .flags = three<float>(arguments, flags, Dtype::kFloat),
  };
  if (norm) {
    const Scalar known = arguments.scalar(norm);
    return Queue(arguments.device_index()).launch(close_window_kernel, 1, 1, known, closing);
  }
  const Call<1> call(spans, arguments.device_index());
  launch_norm(call, 2.0, Scalar{},
              {.norm_dtype = norm_dtype(spans, &Span::dtype), .closing = closing});
}

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("window_factors", accumext::boxed<accumext::cuda::window_factors_cuda>);
}
