// Registering a kernel. TORCH_BOX would do, but for lists: it makes an object of every tensor of a
// list, which for thousands of small tensors takes longer than the work on them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

namespace accumext {

// One tensor of a list, owned.
class TensorHandle {
 public:
  explicit TensorHandle(AtenTensorHandle tensor) : tensor_(tensor) {}
  TensorHandle(const TensorHandle&) = delete;
  ~TensorHandle() { aoti_torch_delete_tensor_object(tensor_); }

  AtenTensorHandle get() const { return tensor_; }

 private:
  AtenTensorHandle tensor_;
};

// A Tensor[] argument, owned: its tensors live as long as it does.
class TensorList {
 public:
  explicit TensorList(StableListHandle list) : list_(list) {}
  TensorList(TensorList&& other) noexcept : list_(std::exchange(other.list_, nullptr)) {}
  ~TensorList() {
    if (list_ != nullptr) torch_delete_list(list_);
  }

  size_t size() const {
    size_t size;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list_, &size));
    return size;
  }

  TensorHandle operator[](size_t i) const { return TensorHandle(item(i)); }

  // The same as an object that may outlive the list.
  torch::stable::Tensor tensor(size_t i) const { return torch::stable::Tensor(item(i)); }

 private:
  AtenTensorHandle item(size_t i) const {
    StableIValue element;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list_, i, &element));
    return torch::stable::detail::to<AtenTensorHandle>(element);
  }

  StableListHandle list_;
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

// What m.impl takes for a kernel.
template <auto kernel>
constexpr auto boxed = &Boxed<kernel>::call;

}  // namespace accumext
