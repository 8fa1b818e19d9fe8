// Tensors of a call as matrices and vectors, checked.
#pragma once

#include <optional>
#include <type_traits>

#include "common/arguments.h"
#include "common/overlap.h"
#include "cuda/decoder/matrix.h"

namespace accumext::cuda {

template <typename T>
int32_t dtype_code() {
  if constexpr (std::is_same_v<T, bool>) {
    return aoti_torch_dtype_bool();
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return aoti_torch_dtype_int64();
  } else if constexpr (std::is_same_v<T, double>) {
    return aoti_torch_dtype_float64();
  } else {
    static_assert(std::is_same_v<T, float>);
    return aoti_torch_dtype_float32();
  }
}

template <typename T>
constexpr auto dtype_of() {
  using torch::headeronly::ScalarType;
  return std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
}

// Makes views of the tensors of one call; all must lie on the device of the first. Written tensors,
// whose T is not const, must not overlap themselves.
class Views {
 public:
  explicit Views(const Tensor& first) : device_(device_of(first)) {
    require(device_.first == aoti_torch_device_type_cuda());
  }

  int32_t device_index() const { return device_.second; }

  template <typename T>
  Matrix<T> matrix(const Tensor& tensor, int64_t rows, int64_t columns) const {
    require(is<T>(tensor));
    const AnyMatrix any = strided(tensor, rows, columns, !std::is_const_v<T>);
    return {static_cast<T*>(any.data), any.row_stride, any.column_stride};
  }

  template <typename T>
  Matrix<T> matrix(const std::optional<Tensor>& tensor, int64_t rows, int64_t columns) const {
    return tensor ? matrix<T>(*tensor, rows, columns) : Matrix<T>{};
  }

  // Of any float dtype.
  AnyMatrix any_matrix(const std::optional<Tensor>& tensor, int64_t rows, int64_t columns,
                       bool written = true) const {
    if (!tensor) return {};
    const Dtype dtype = float_dtype(*tensor);
    AnyMatrix view = strided(*tensor, rows, columns, written);
    view.dtype = dtype;
    return view;
  }

  // A matrix of any float dtype that is only read.
  AnyMatrix operand(const Tensor& tensor, int64_t rows, int64_t columns) const {
    return any_matrix(tensor, rows, columns, /*written=*/false);
  }

  // A contiguous vector of so many elements.
  template <typename T>
  T* dense(const Tensor& tensor, int64_t size) const {
    require(is<T>(tensor) && tensor.numel() == size && tensor.is_contiguous());
    return static_cast<T*>(tensor.data_ptr());
  }

  template <typename T>
  T* dense(const std::optional<Tensor>& tensor, int64_t size) const {
    return tensor ? dense<T>(*tensor, size) : nullptr;
  }

  template <typename T>
  Column<T> column(const Tensor& tensor, int64_t size) const {
    require(is<T>(tensor) && tensor.dim() == 1 && tensor.size(0) == size);
    require(std::is_const_v<T> || size <= 1 || tensor.stride(0) > 0);
    return {static_cast<T*>(tensor.data_ptr()), tensor.stride(0)};
  }

  template <typename T>
  Column<T> column(const std::optional<Tensor>& tensor, int64_t size) const {
    return tensor ? column<T>(*tensor, size) : Column<T>{};
  }

 private:
  static std::pair<int32_t, int32_t> device_of(const Tensor& tensor) {
    return {property(aoti_torch_get_device_type, tensor),
            property(aoti_torch_get_device_index, tensor)};
  }

  template <typename T>
  bool is(const Tensor& tensor) const {
    return device_of(tensor) == device_ &&
           property(aoti_torch_get_dtype, tensor) == dtype_code<std::remove_const_t<T>>();
  }

  AnyMatrix strided(const Tensor& tensor, int64_t rows, int64_t columns, bool written) const {
    require(device_of(tensor) == device_ && tensor.dim() == 2);
    require(tensor.size(0) == rows && tensor.size(1) == columns);
    const AnyMatrix view{.data = tensor.data_ptr(),
                         .row_stride = tensor.stride(0),
                         .column_stride = tensor.stride(1)};
    require(!written || rows == 0 || columns == 0 ||
            !overlaps_itself<1>({{rows, {view.row_stride}}, {columns, {view.column_stride}}}, 0));
    return view;
  }

  std::pair<int32_t, int32_t> device_;  // type, index
};

}  // namespace accumext::cuda
