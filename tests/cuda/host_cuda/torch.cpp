// The calls of launchers to torch, for tensors of the CPU that stand for a device's: its memory is
// there in the order of a stream, and its operators are put on the stream.
#include <cuda_runtime.h>
#include <sanitizer/asan_interface.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime.h"

namespace {

using torch::headeronly::ScalarType;
namespace conversion = torch::stable::detail;
using Tensor = std::shared_ptr<AtenTensorOpaque>;

template <typename T>
T property(AOTITorchError (*get)(AtenTensorHandle, T*), const Tensor& tensor) {
  T value;
  get(tensor.get(), &value);
  return value;
}

// An argument of an operator that is done later. Torch keeps it until then, unless a graph is to do
// it, which keeps no tensor.
class Argument {
 public:
  explicit Argument(AtenTensorHandle handle) {
    const Tensor tensor(handle, aoti_torch_delete_tensor_object);
    const int64_t* sizes = property(aoti_torch_get_sizes, tensor);
    const int64_t* strides = property(aoti_torch_get_strides, tensor);
    sizes_.assign(sizes, sizes + property(aoti_torch_get_dim, tensor));
    strides_.assign(strides, strides + sizes_.size());
    data_ = property(aoti_torch_get_data_ptr, tensor);
    dtype_ = property(aoti_torch_get_dtype, tensor);
    if (!host_cuda::is_capturing()) kept_ = tensor;
  }

  // Its memory must be there now.
  AtenTensorHandle tensor() const {
    int64_t end = std::ranges::count(sizes_, 0) > 0 ? 0 : 1;  // in elements
    for (size_t dim = 0; end > 0 && dim < sizes_.size(); ++dim) {
      end += (sizes_[dim] - 1) * strides_[dim];
    }
    if (__asan_region_is_poisoned(data_, end * aoti_torch_dtype_element_size(dtype_)) != nullptr) {
      host_cuda::fail("an operator of torch has lost its memory", host_cuda::Site::current());
    }
    AtenTensorHandle handle = nullptr;
    aoti_torch_create_tensor_from_blob(data_, static_cast<int64_t>(sizes_.size()), sizes_.data(),
                                       strides_.data(), /*storage_offset=*/0, dtype_,
                                       aoti_torch_device_type_cpu(), /*device_index=*/-1, &handle);
    return handle;
  }

 private:
  std::vector<int64_t> sizes_, strides_;
  void* data_;
  int32_t dtype_;
  Tensor kept_;
};

// An operator that writes argument `out`, with those tensors among its arguments.
StableIValue enqueued(std::string name, std::string overload, std::span<const StableIValue> stack,
                      std::initializer_list<int> tensors, int out) {
  AtenTensorHandle result = nullptr;
  aoti_torch_new_tensor_handle(conversion::to<AtenTensorHandle>(stack[out]), &result);
  std::map<int, Argument> held;
  for (const int i : tensors) held.emplace(i, conversion::to<AtenTensorHandle>(stack[i]));
  const std::vector<StableIValue> others(stack.begin(), stack.end());
  host_cuda::enqueue([=] {
    std::vector<StableIValue> call = others;
    for (const auto& [i, argument] : held) call[i] = conversion::from(argument.tensor());
    if (torch_call_dispatcher(name.c_str(), overload.c_str(), call.data(), TORCH_ABI_VERSION)) {
      host_cuda::fail(("torch cannot do " + name).c_str(), host_cuda::Site::current());
    }
    aoti_torch_delete_tensor_object(conversion::to<AtenTensorHandle>(call[0]));
  });
  return conversion::from(result);
}

// Uninitialised memory of the device, or of the host, which is there at once and until the tensor
// goes.
AtenTensorHandle empty(const std::vector<int64_t>& shape, ScalarType dtype, bool of_host) {
  std::vector<int64_t> strides(shape.size());
  int64_t numel = 1;
  for (size_t dim = shape.size(); dim-- > 0; numel *= shape[dim]) strides[dim] = numel;
  const auto code = static_cast<int32_t>(dtype);
  const size_t bytes = numel * aoti_torch_dtype_element_size(code);
  void* const memory = of_host ? std::malloc(bytes) : host_cuda::take(bytes);
  const auto free_host = [](void* memory, void*) { std::free(memory); };
  const auto give_back = [](void* memory, void*) { host_cuda::give_back(memory); };
  AtenTensorHandle tensor = nullptr;
  torch_from_blob(memory, static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                  /*storage_offset=*/0, code, aoti_torch_device_type_cpu(), /*device_index=*/-1,
                  &tensor, aoti_torch_layout_strided(), /*opaque_metadata=*/nullptr, 0,
                  of_host ? +free_host : +give_back, /*deleter_ctx=*/nullptr);
  return tensor;
}

int guards = 0;                 // of the operators that are running
std::vector<const void*> seen;  // memory of tensors, by the operator that is running

}  // namespace

extern "C" {

AOTITorchError host_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                    uint64_t version) {
  const std::string full = std::string(name) + "." + overload;
  if (full == "aten::empty.memory_format") {
    const auto shape = conversion::to<std::vector<int64_t>>(stack[0]);
    const auto dtype = conversion::to<std::optional<ScalarType>>(stack[1]);
    const auto device = conversion::to<std::optional<torch::stable::Device>>(stack[3]);
    conversion::to<std::optional<bool>>(stack[4]);  // whether it is to be pinned
    stack[0] = conversion::from(empty(shape, *dtype, device->is_cpu()));
  } else if (full == "aten::copy_.") {
    stack[0] = enqueued(name, overload, {stack, 3}, {0, 1}, 0);
  } else if (full == "aten::mm.out") {
    stack[0] = enqueued(name, overload, {stack, 3}, {0, 1, 2}, 2);
  } else if (full == "aten::mm.dtype_out") {
    stack[0] = enqueued(name, overload, {stack, 4}, {0, 1, 3}, 3);
  } else {
    return torch_call_dispatcher(name, overload, stack, version);
  }
  return 0;
}

AOTITorchError host_create_tensor_from_blob(void* data, int64_t ndim, const int64_t* sizes,
                                            const int64_t* strides, int64_t offset, int32_t dtype,
                                            int32_t type, int32_t, AtenTensorHandle* tensor) {
  return aoti_torch_create_tensor_from_blob(data, ndim, sizes, strides, offset, dtype, type, -1,
                                            tensor);
}

// All memory of the tensor's storage is the device's.
AOTITorchError host_get_data_ptr(AtenTensorHandle tensor, void** data) {
  const AOTITorchError error = aoti_torch_get_data_ptr(tensor, data);
  if (*data == nullptr) return error;  // of no elements
  int64_t bytes = 0, offset = 0;
  int32_t dtype = 0;
  aoti_torch_get_storage_size(tensor, &bytes);
  aoti_torch_get_storage_offset(tensor, &offset);
  aoti_torch_get_dtype(tensor, &dtype);
  const auto before = offset * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  seen.push_back(static_cast<std::byte*>(*data) - before);
  host_cuda::watch_tensor(seen.back(), bytes);
  return error;
}

AOTITorchError host_get_device_index(AtenTensorHandle, int32_t* index) {
  *index = host_cuda::device();
  return 0;
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = host_cuda::stream();
  return 0;
}

AOTITorchError host_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  *guard = reinterpret_cast<DeviceGuardHandle>(new int(host_cuda::device()));
  host_cuda::use_device(device);
  ++guards;
  return 0;
}

// Where an operator ends.
AOTITorchError host_delete_device_guard(DeviceGuardHandle guard) {
  const std::unique_ptr<int> before(reinterpret_cast<int*>(guard));
  host_cuda::use_device(*before);
  if (--guards > 0) return 0;
  host_cuda::end_of_operator();
  for (const void* const memory : std::exchange(seen, {})) host_cuda::forget_tensor(memory);
  return 0;
}

AOTITorchError torch_c10_cuda_check_msg(int32_t error, const char*, const char*, uint32_t, bool,
                                        char** message) {
  if (error == cudaSuccess) return 0;
  cudaGetLastError();
  *message = strdup(cudaGetErrorName(static_cast<cudaError_t>(error)));
  return 0;
}

void torch_c10_cuda_free_error_msg(char* message) { std::free(message); }
}
