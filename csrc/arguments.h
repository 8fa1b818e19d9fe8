// The tensors of a call as kernels see them, checked. Which contract is broken is not said here:
// the Python function asks accumext/_checks.py, so that every backend gives the same sentence.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "operands.h"

namespace accumext {

using torch::stable::Tensor;

inline void require(bool contract) {
  if (!contract) {
    throw std::runtime_error(
        "accumext: an argument breaks the operator's contract; accumext.<operator> says which");
  }
}

inline Dtype float_dtype(const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return Dtype::kHalf;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Float:
      return Dtype::kFloat;
    case ScalarType::Double:
      return Dtype::kDouble;
    default:
      require(false);
      return Dtype::kDouble;
  }
}

// Collects the tensors of one call; all must lie on the device of the first.
class Arguments {
 public:
  std::vector<Span> spans(const std::vector<Tensor>& grads, bool written) {
    std::vector<Span> spans;
    spans.reserve(grads.size());
    for (const Tensor& grad : grads) {
      const Dtype dtype = dense_float(grad);
      spans.push_back({grad.data_ptr(), dtype, grad.numel(), layout<1>({&grad}, written)});
    }
    return spans;
  }

  std::vector<Pair> pairs(const std::vector<Tensor>& main_grads, const std::vector<Tensor>& grads) {
    require(main_grads.size() == grads.size());
    std::vector<Pair> pairs;
    pairs.reserve(grads.size());
    for (size_t i = 0; i < grads.size(); ++i) {
      const Tensor& main_grad = main_grads[i];
      const Tensor& grad = grads[i];
      const Dtype main_dtype = dense_float(main_grad);
      const Dtype grad_dtype = dense_float(grad);
      const auto shape = main_grad.sizes();
      require(shape.equals(grad.sizes()));
      pairs.push_back({main_grad.data_ptr(), grad.data_ptr(), main_dtype, grad_dtype, grad.numel(),
                       layout<2>({&main_grad, &grad}, /*written=*/true)});
    }
    return pairs;
  }

  Scalar scalar(double value) {
    require(!std::isnan(value));
    return {.value = value};
  }

  Scalar scalar(const std::optional<Tensor>& tensor) {
    if (!tensor) return {};
    const Dtype dtype = dense_float(*tensor);
    require(tensor->dim() == 0);
    return {.data = tensor->data_ptr(), .dtype = dtype};
  }

  // Null where no flag is wanted.
  float* found_inf(const std::optional<Tensor>& tensor) {
    if (!tensor) return nullptr;
    require(dense_float(*tensor) == Dtype::kFloat && tensor->dim() == 0);
    return static_cast<float*>(tensor->data_ptr());
  }

  double max_norm(double value) const {
    require(value >= 0.0);
    return value;
  }

  double norm_type(double value) const {
    require(value != 0.0 && !std::isnan(value));
    return value;
  }

 private:
  Dtype dense_float(const Tensor& tensor) {
    require(tensor.layout() == torch::headeronly::Layout::Strided);
    if (!device_) device_ = tensor.device();
    require(*device_ == tensor.device());
    return float_dtype(tensor);
  }

  // Operand 0 must not overlap itself where it is written.
  template <int kOperands>
  static Layout<kOperands> layout(const Tensor* const (&operands)[kOperands], bool written) {
    bool contiguous = true;
    for (const Tensor* operand : operands) contiguous = contiguous && operand->is_contiguous();
    if (contiguous || operands[0]->numel() == 0) return {};
    Layout<kOperands> dims(operands[0]->dim());
    for (size_t d = 0; d < dims.size(); ++d) {
      dims[d].size = operands[0]->size(d);
      for (int k = 0; k < kOperands; ++k) dims[d].stride[k] = operands[k]->stride(d);
    }
    require(!written || !overlaps_itself(dims, 0));
    return simplified(dims);
  }

  std::optional<torch::stable::Device> device_;
};

// A 0-dim 0 in which a norm of these tensors is reported: float64 if any of them is, on their
// device.
inline Tensor norm_result(const std::vector<Tensor>& tensors) {
  using torch::headeronly::DeviceType;
  using torch::headeronly::ScalarType;
  using torch::stable::Device;
  bool wide = false;
  for (const Tensor& tensor : tensors) wide = wide || tensor.scalar_type() == ScalarType::Double;
  const Device device = tensors.empty() ? Device(DeviceType::CPU) : tensors[0].device();
  return torch::stable::full({}, 0.0, wide ? ScalarType::Double : ScalarType::Float, std::nullopt,
                             device);
}

}  // namespace accumext
