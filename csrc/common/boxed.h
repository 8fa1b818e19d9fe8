// The registration of a kernel. TORCH_BOX makes an object of every tensor of a list, which takes
// longer for thousands of small tensors than the work on them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace accumext {

// A tensor, owned.
class TensorHandle {
 public:
  explicit TensorHandle(AtenTensorHandle tensor) : tensor_(tensor) {}
  TensorHandle(TensorHandle&& other) noexcept : tensor_(other.release()) {}
  ~TensorHandle() {
    if (tensor_ != nullptr) aoti_torch_delete_tensor_object(tensor_);
  }

  AtenTensorHandle get() const { return tensor_; }
  AtenTensorHandle release() { return std::exchange(tensor_, nullptr); }

 private:
  AtenTensorHandle tensor_;
};

// A Tensor[] argument. It owns its tensors for the whole call, since the handles in a list from the
// dispatcher belong to the kernel. It may be the only owner: of a tensor with the negative or
// conjugate bit the dispatcher makes a plain copy for this call.
class TensorList {
 public:
  explicit TensorList(StableListHandle list) {
    const std::unique_ptr<StableListOpaque, Delete> owned(list);
    size_t size;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    tensors_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element;
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &element));
      tensors_.emplace_back(torch::stable::detail::to<AtenTensorHandle>(element));
    }
  }

  size_t size() const { return tensors_.size(); }

  const TensorHandle& operator[](size_t i) const { return tensors_[i]; }

  // The same as objects, which take the tensors over.
  std::vector<torch::stable::Tensor> tensors() && {
    std::vector<torch::stable::Tensor> result;
    result.reserve(size());
    for (TensorHandle& tensor : tensors_) result.emplace_back(tensor.release());
    return result;
  }

 private:
  struct Delete {
    void operator()(StableListHandle list) const { torch_delete_list(list); }
  };

  std::vector<TensorHandle> tensors_;
};

template <typename T>
T unboxed(StableIValue value) {
  if constexpr (std::is_same_v<T, TensorList>) {
    return TensorList(torch::stable::detail::to<StableListHandle>(value));
  } else {
    return torch::stable::detail::to<T>(value);
  }
}

template <auto kernel>
struct Boxed;

template <typename Result, typename... Arguments, Result (*kernel)(Arguments...)>
struct Boxed<kernel> {
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    [stack]<size_t... i>(std::index_sequence<i...>) {
      // Braces, so that arguments are taken from the stack in order.
      std::tuple<Arguments...> arguments{unboxed<Arguments>(stack[i])...};
      if constexpr (std::is_void_v<Result>) {
        kernel(std::move(std::get<i>(arguments))...);
      } else {
        stack[0] = torch::stable::detail::from(kernel(std::move(std::get<i>(arguments))...));
      }
    }(std::index_sequence_for<Arguments...>());
  }
};

// The boxed form of a kernel, which m.impl takes.
template <auto kernel>
constexpr auto boxed = &Boxed<kernel>::call;

}  // namespace accumext
