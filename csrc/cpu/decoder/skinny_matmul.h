// A weight that is multiplied with a few columns at a time, and the columns in the layout that the
// product reads. Columns of a step are transposed, [depth, padded(columns)]: neighbours in memory
// are the same unit of neighbouring rows of the batch.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "common/arguments.h"
#include "cpu/decoder/kernels.h"
#include "cpu/simd/types.h"

namespace accumext::cpu {

template <typename T>
constexpr Dtype kDtypeOf = std::is_same_v<T, double> ? Dtype::kDouble : Dtype::kFloat;

template <typename T>
constexpr auto kScalarType = std::is_same_v<T, double> ? torch::headeronly::ScalarType::Double
                                                       : torch::headeronly::ScalarType::Float;

// Elements of a tensor that must have this dtype and be contiguous.
template <typename T>
T* elements(const Tensor& tensor) {
  require(float_dtype(tensor) == kDtypeOf<T> && tensor.is_contiguous());
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
const T* elements(const std::optional<Tensor>& tensor) {
  return tensor ? elements<T>(*tensor) : nullptr;
}

inline int64_t* integers(const Tensor& tensor) {
  require(property(aoti_torch_get_dtype, tensor) == aoti_torch_dtype_int64() &&
          tensor.is_contiguous());
  return static_cast<int64_t*>(tensor.mutable_data_ptr());
}

inline bool* booleans(const Tensor& tensor) {
  require(property(aoti_torch_get_dtype, tensor) == aoti_torch_dtype_bool() &&
          tensor.is_contiguous());
  return static_cast<bool*>(tensor.mutable_data_ptr());
}

// Uninitialised numbers that begin with a cache line, as those of a tensor do: elsewhere every load
// of a whole line reads two.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<T*>(::operator new(size * sizeof(T), kLine))) {}
  T* get() const { return data_.get(); }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(T* data) const { ::operator delete(data, kLine); }
  };
  std::unique_ptr<T[], Free> data_;
};

template <typename T>
class Skinny {
 public:
  // weight [rows, depth], its rows contiguous; bias [rows] or null.
  Skinny(const Tensor& weight, const T* bias, int64_t columns)
      : rows(weight.size(0)), depth(weight.size(1)), dtype_(float_dtype(weight)) {
    require(weight.dim() == 2 && (weight.stride(1) == 1 || depth <= 1));
    require((kDtypeOf<T> == Dtype::kDouble) == (dtype_ == Dtype::kDouble));
    if constexpr (std::is_same_v<T, float>) {
      // With fewer columns, most of a pair's register or tile would be padding.
      if (dtype_ == Dtype::kBFloat16 && columns > kDotColumns) paired_ = paired_kernels();
    }
    product_ = {.weight = weight.const_data_ptr(),
                .weight_dtype = dtype_,
                .depth = depth,
                .stride = weight.stride(0),
                .panel = nullptr,
                .paired = paired_ != nullptr,
                .columns = 0,
                .bias = bias,
                .out = nullptr,
                .out_stride = 0};
    columns_ = columns;
  }

  // Takes the columns to multiply with: `count` of `x` [depth, stride], or those in `named`.
  void take(const T* x, int64_t stride, int64_t count, const int64_t* named = nullptr) {
    product_.columns = count;
    if (product_.paired) return pair(x, stride, count, named);
    const auto column = [&](int64_t i) { return named != nullptr ? named[i] : i; };
    const int64_t width = padded(count);
    const bool dots = count <= kDotColumns;
    if (!dots && dtype_ == kDtypeOf<T> && named == nullptr && stride == width) {
      product_.panel = x;
      return;
    }
    if (!panel_) panel_.emplace(depth * padded(columns_));
    T* panel = panel_->get();
    product_.panel = panel;
    for (int64_t i = 0; dots && i < count; ++i) {
      for (int64_t k = 0; k < depth; ++k, ++panel) *panel = x[k * stride + column(i)];
    }
    for (int64_t k = 0; !dots && k < depth; ++k, panel += width) {
      for (int64_t i = 0; i < count; ++i) panel[i] = x[k * stride + column(i)];
      std::fill(panel + count, panel + width, T(0));
    }
    decoder_kernels<T>().round(dtype_, panel_->get(), panel - panel_->get());
  }

  // Rows [begin, end) of the product, to out [rows, stride].
  void run(int64_t begin, int64_t end, T* out, int64_t stride) const {
    Product<T> product = product_;
    product.out = out;
    product.out_stride = stride;
    if constexpr (std::is_same_v<T, float>) {
      if (paired_ != nullptr) return paired_->product(product, begin, end);
    }
    decoder_kernels<T>().product(product, begin, end);
  }

  const int64_t rows;
  const int64_t depth;

 private:
  void pair(const T* x, int64_t stride, int64_t count, const int64_t* named) {
    const int64_t width = up_to(kTile, count);
    const int64_t terms = up_to(2 * kTile, depth);
    if (!panel_) panel_.emplace(terms / 2 * up_to(kTile, columns_));
    product_.panel = panel_->get();
    auto* to = reinterpret_cast<torch::headeronly::BFloat16*>(panel_->get());
    std::memset(static_cast<void*>(to), 0, terms * width * sizeof(*to));
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t i = 0; i < count; ++i) {
        to[((k / 2) * width + i) * 2 + k % 2] =
            static_cast<float>(x[k * stride + (named != nullptr ? named[i] : i)]);
      }
    }
  }

  Dtype dtype_;
  int64_t columns_;  // at most
  const PairedKernels* paired_ = nullptr;
  Product<T> product_;
  std::optional<Buffer<T>> panel_;
};

}  // namespace accumext::cpu
