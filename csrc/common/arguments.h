// The tensors of a call as kernels see them, checked. Errors are not described here: the Python
// function gets the text from accumext/ops/_contracts.py, so that all backends give the same one.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/aliases.h"
#include "common/boxed.h"
#include "common/operands.h"
#include "common/overlap.h"

namespace accumext {

using torch::stable::Tensor;

inline void require(bool contract) {
  if (!contract) {
    throw std::runtime_error(
        "accumext: an argument breaks the operator's contract; accumext.<operator> says which");
  }
}

// A property of a tensor by one of the aoti_torch_* functions: called directly and not through
// Tensor, since lists are long.
template <typename T, typename Handle>
T property(AOTITorchError (*get)(AtenTensorHandle, T*), const Handle& tensor) {
  T value;
  TORCH_ERROR_CODE_CHECK(get(tensor.get(), &value));
  return value;
}

template <typename Handle>  // TensorHandle or Tensor
Dtype float_dtype(const Handle& tensor) {
  static const int32_t kCodes[] = {aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16(),
                                   aoti_torch_dtype_float32(), aoti_torch_dtype_float64()};
  const int32_t* code = std::find(kCodes, kCodes + 4, property(aoti_torch_get_dtype, tensor));
  require(code != kCodes + 4);
  return static_cast<Dtype>(code - kCodes);
}

// Collects the tensors of one call; all must lie on the device of the first.
class Arguments {
 public:
  std::vector<Span> spans(const TensorList& grads, bool written) {
    std::vector<Span> spans;
    const size_t size = grads.size();
    spans.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      const TensorHandle& grad = grads[i];
      const Dtype dtype = dense_float(grad);
      const int64_t numel = property(aoti_torch_get_numel, grad);
      spans.push_back({property(aoti_torch_get_data_ptr, grad), dtype, numel,
                       layout<1>({&grad}, numel, written)});
    }
    return spans;
  }

  std::vector<Pair> pairs(const TensorList& main_grads, const TensorList& grads) {
    std::vector<Pair> pairs;
    const size_t size = grads.size();
    require(main_grads.size() == size);
    pairs.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      const TensorHandle& main_grad = main_grads[i];
      const TensorHandle& grad = grads[i];
      const Dtype main_dtype = dense_float(main_grad);
      const Dtype grad_dtype = dense_float(grad);
      require_same_shape(main_grad, grad);
      const int64_t numel = property(aoti_torch_get_numel, grad);
      pairs.push_back({property(aoti_torch_get_data_ptr, main_grad),
                       property(aoti_torch_get_data_ptr, grad), main_dtype, grad_dtype, numel,
                       layout<2>({&main_grad, &grad}, numel, /*written=*/true)});
    }
    return pairs;
  }

  // The same pairs with the numbers of their elements.
  static std::vector<NumberedPair> numbered(const std::vector<Pair>& pairs,
                                            const TensorList& main_grads, const TensorList& grads) {
    std::vector<NumberedPair> numbered;
    numbered.reserve(pairs.size());
    for (size_t i = 0; i < pairs.size(); ++i) {
      const Pair& pair = pairs[i];
      numbered.push_back({pair, pair.numel,
                          layout<3>({&main_grads[i], &grads[i]}, pair.numel, /*written=*/false),
                          static_cast<int64_t>(i)});
    }
    return numbered;
  }

  // Requires that written memory belongs to no other argument, unless a main gradient is its own
  // gradient.
  static void require_apart(const std::vector<Pair>& pairs, const Scalar& factor,
                            const float* found_inf) {
    const Cell flag{found_inf, Dtype::kFloat};
    const Cell number{factor.data, factor.dtype};
    for (const Pair& pair : pairs) {
      require(!meets(number, main_place(pair)) && !meets(flag, main_place(pair)));
      require(!meets(flag, grad_place(pair)));
    }
    require(!meets(flag, number) && !share_memory(pairs));
  }

  // The same if seed and flag are only read.
  static void require_apart(const std::vector<Pair>& pairs, const int64_t* seed,
                            const float* found_inf) {
    const Cell flag{found_inf, Dtype::kFloat};
    const Cell number{seed, Dtype::kDouble};  // int64_t has as many bytes
    for (const Pair& pair : pairs) {
      require(!meets(number, main_place(pair)) && !meets(flag, main_place(pair)));
    }
    require(!share_memory(pairs));
  }

  // The same for tensors that are only read.
  static void require_apart(const std::vector<Span>& spans, const Scalar& factor,
                            const float* found_inf) {
    const Cell flag{found_inf, Dtype::kFloat};
    for (const Span& span : spans) require(!meets(flag, place(span)));
    require(!meets(flag, Cell{factor.data, factor.dtype}));
  }

  // The same for tensors that are multiplied in place.
  static void require_apart(const std::vector<Span>& spans, const Scalar& factor) {
    const Cell number{factor.data, factor.dtype};
    for (const Span& span : spans) require(!meets(number, place(span)));
  }

  // The dtype of a tensor of the call, which is a dense one of floating-point numbers.
  template <typename Handle>
  Dtype dense_float(const Handle& tensor) {
    require_dense(tensor);
    return float_dtype(tensor);
  }

  // A tensor of the call that is a dense one.
  template <typename Handle>
  void require_dense(const Handle& tensor) {
    require(property(aoti_torch_get_layout, tensor) == aoti_torch_layout_strided());
    const std::pair device(property(aoti_torch_get_device_type, tensor),
                           property(aoti_torch_get_device_index, tensor));
    if (!device_) device_ = device;
    require(*device_ == device);
  }

  // The device of the collected tensors, of which there must be one.
  int32_t device_index() const { return device_->second; }

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

  // Null if no flag is wanted.
  float* found_inf(const std::optional<Tensor>& tensor) {
    if (!tensor) return nullptr;
    require(dense_float(*tensor) == Dtype::kFloat && tensor->dim() == 0);
    return static_cast<float*>(tensor->data_ptr());
  }

  // Null if no seed is given.
  const int64_t* seed(const std::optional<Tensor>& tensor) {
    if (!tensor) return nullptr;
    require_dense(*tensor);
    require(property(aoti_torch_get_dtype, *tensor) == aoti_torch_dtype_int64());
    require(tensor->dim() == 0);
    return static_cast<const int64_t*>(tensor->data_ptr());
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
  static void require_same_shape(const TensorHandle& a, const TensorHandle& b) {
    const int64_t dim = property(aoti_torch_get_dim, a);
    require(dim == property(aoti_torch_get_dim, b));
    const int64_t* sizes = property(aoti_torch_get_sizes, a);
    require(std::equal(sizes, sizes + dim, property(aoti_torch_get_sizes, b)));
  }

  // Operand 0 must not overlap itself if it is written. An operand without a tensor is the number
  // of the element in row-major order.
  template <int kOperands, int kTensors>
  static Layout<kOperands> layout(const TensorHandle* const (&operands)[kTensors], int64_t numel,
                                  bool written) {
    bool contiguous = true;
    for (const TensorHandle* operand : operands) {
      contiguous = contiguous && property(aoti_torch_is_contiguous, *operand);
    }
    if (contiguous || numel == 0) return {};
    Layout<kOperands> dims(property(aoti_torch_get_dim, *operands[0]));
    for (int k = 0; k < kTensors; ++k) {
      const int64_t* sizes = property(aoti_torch_get_sizes, *operands[k]);
      const int64_t* strides = property(aoti_torch_get_strides, *operands[k]);
      for (size_t d = 0; d < dims.size(); ++d) {
        dims[d].size = sizes[d];
        dims[d].stride[k] = strides[d];
      }
    }
    for (int k = kTensors; k < kOperands; ++k) {
      int64_t stride = 1;
      for (size_t d = dims.size(); d-- > 0; stride *= dims[d].size) dims[d].stride[k] = stride;
    }
    require(!written || !overlaps_itself(dims, 0));
    return simplified(dims);
  }

  std::optional<std::pair<int32_t, int32_t>> device_;  // type, index
};

}  // namespace accumext
