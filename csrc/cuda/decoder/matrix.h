// Strided matrices and vectors as kernels see them: no torch here, and no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/operands.h"
#include "math/host_device.h"

namespace accumext::cuda {

template <typename T>
struct Matrix {
  T* data = nullptr;  // null: there is none
  int64_t row_stride = 0;
  int64_t column_stride = 0;  // elements

  ACCUMEXT_HOST_DEVICE T* at(int64_t row, int64_t column) const {
    return data + (row * row_stride + column * column_stride);
  }

  // Its rows from `first` on.
  Matrix from_row(int64_t first) const {
    return {data == nullptr ? nullptr : at(first, 0), row_stride, column_stride};
  }
};

// A matrix whose dtype is known at run time.
struct AnyMatrix {
  void* data = nullptr;  // null: there is none
  Dtype dtype = Dtype::kFloat;
  int64_t row_stride = 0;
  int64_t column_stride = 0;  // elements

  template <typename T>
  ACCUMEXT_HOST_DEVICE Matrix<T> as() const {
    return {static_cast<T*>(data), row_stride, column_stride};
  }

  // Its rows from `first` on.
  AnyMatrix from_row(int64_t first) const {
    AnyMatrix rest = *this;
    const int64_t bytes = first * row_stride * size_of(dtype);
    if (data != nullptr) rest.data = static_cast<std::byte*>(data) + bytes;
    return rest;
  }
};

template <typename T>
struct Column {
  T* data = nullptr;   // null: there is none
  int64_t stride = 0;  // elements

  ACCUMEXT_HOST_DEVICE T& operator[](int64_t i) const { return data[i * stride]; }

  // Its elements from `first` on.
  Column from(int64_t first) const {
    return {data == nullptr ? nullptr : data + first * stride, stride};
  }
};

}  // namespace accumext::cuda
