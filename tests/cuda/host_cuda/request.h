// A driver's request, and the device memory in which the driver runs it.
#pragma once

#include "simt.h"
//
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/operands.h"
#include "cuda/decoder/persistent_call.h"

namespace host_cuda {

using Bytes = std::vector<std::byte>;

// Device memory: aligned as by torch's allocator, between guards that no kernel may touch.
class Memory {
 public:
  explicit Memory(size_t size)
      : size_(size),
        capacity_((size + 3 * kGuard - 1) / kGuard * kGuard),
        begin_(static_cast<std::byte*>(std::aligned_alloc(kGuard, capacity_))) {
    std::fill(begin_, begin_ + capacity_, kUnwritten);
    __asan_poison_memory_region(begin_, kGuard);
    __asan_poison_memory_region(end(), capacity_ - kGuard - size_);
    if constexpr (races::kOn) races::watch(races::Space::kDevice, data(), size_);
  }
  explicit Memory(const Bytes& content) : Memory(content.size()) {
    std::copy(content.begin(), content.end(), data());
  }
  Memory(const Memory&) = delete;

  ~Memory() {
    if constexpr (races::kOn) races::forget(data());
    __asan_unpoison_memory_region(begin_, capacity_);
    const auto written = [](std::byte byte) { return byte != kUnwritten; };
    if (std::any_of(begin_, data(), written) || std::any_of(end(), begin_ + capacity_, written)) {
      fail("a kernel wrote beside a tensor", Site::current());
    }
    std::free(begin_);
  }

  std::byte* data() const { return begin_ + kGuard; }
  std::byte* end() const { return data() + size_; }

 private:
  static constexpr size_t kGuard = 512;         // bytes; also the alignment
  static constexpr std::byte kUnwritten{0xff};  // NaN in every dtype

  size_t size_;
  size_t capacity_;
  std::byte* begin_;
};

template <typename T>
struct Array : Memory {  // [size]
  explicit Array(int64_t size) : Memory(size * sizeof(T)) {}
  T* data() const { return reinterpret_cast<T*>(Memory::data()); }
};

// Numbers of 8 bytes, and counted bytes, in order.
class Request {
 public:
  explicit Request(const Bytes& bytes) : next_(bytes.data()) {}

  int64_t integer() { return take<int64_t>(); }
  double number() { return take<double>(); }

  Bytes bytes() {
    const int64_t size = integer();
    next_ += size;
    return Bytes(next_ - size, next_);
  }

 private:
  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, next_, sizeof(T));
    next_ += sizeof(T);
    return value;
  }

  const std::byte* next_;
};

// A tensor among the arguments.
struct Tensor {
  std::byte* data = nullptr;  // null: there is none
  accumext::Dtype dtype = accumext::Dtype::kFloat;
  std::vector<int64_t> sizes, strides;  // elements

  int64_t numel() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  }

  bool contiguous() const {
    int64_t dense = 1;
    for (size_t d = sizes.size(); d-- > 0; dense *= sizes[d]) {
      if (sizes[d] != 1 && strides[d] != dense) return false;
    }
    return true;
  }
};

// One run of a call, with memory of its own for its tensors.
class Run {
 public:
  Run(Request request, Device& device, int64_t grid)
      : request_(request), device_(device), grid_(grid) {
    for (int64_t left = request_.integer(); left > 0; --left) {
      memory_.emplace_back(request_.bytes());
    }
  }

  void write_memory() const {
    for (const Memory& memory : memory_) {
      std::fwrite(memory.data(), 1, memory.end() - memory.data(), stdout);
    }
  }

 protected:
  // The next arguments.
  template <typename... Values>
  void read(Values&... values) {
    (read_one(values), ...);
  }

  template <typename T>
  T next() {
    T value{};
    read_one(value);
    return value;
  }

  Device& device_;
  int64_t grid_;

 private:
  template <typename T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void read_one(T& value) {
    if constexpr (std::is_floating_point_v<T>) {
      value = static_cast<T>(request_.number());
    } else {
      value = static_cast<T>(request_.integer());
    }
  }

  void read_one(Tensor& tensor) {
    const int64_t index = request_.integer();
    const int64_t offset = request_.integer();  // bytes
    tensor.data = index < 0 ? nullptr : memory_[index].data() + offset;
    read(tensor.dtype, tensor.sizes, tensor.strides);
  }

  template <typename T>
  void read_one(std::vector<T>& values) {
    values.resize(request_.integer());
    for (T& value : values) read_one(value);
  }

  template <typename T>
  void read_one(T*& pointer) {
    pointer = reinterpret_cast<T*>(next<Tensor>().data);
  }

  template <typename T>
  void read_one(accumext::cuda::Column<T>& column) {
    const Tensor tensor = next<Tensor>();
    column.data = reinterpret_cast<T*>(tensor.data);
    if (tensor.data != nullptr) column.stride = tensor.strides.at(0);
  }

  void read_one(accumext::cuda::AnyMatrix& matrix) {
    const Tensor tensor = next<Tensor>();
    matrix = {.data = tensor.data, .dtype = tensor.dtype};
    if (tensor.data == nullptr) return;
    matrix.row_stride = tensor.strides.at(0);
    matrix.column_stride = tensor.strides.at(1);
  }

  template <typename T>
  void read_one(accumext::cuda::Matrix<T>& matrix) {
    matrix = next<accumext::cuda::AnyMatrix>().template as<T>();
  }

  void read_one(accumext::cuda::AnyVector& vector) {
    const Tensor tensor = next<Tensor>();
    vector = {tensor.data, tensor.dtype};
  }

  void read_one(accumext::Scalar& scalar) {
    const Tensor tensor = next<Tensor>();
    scalar = {tensor.data, tensor.dtype, request_.number()};
  }

  Request request_;
  std::deque<Memory> memory_;
};

inline Bytes standard_input() {
  Bytes bytes;
  std::byte block[1 << 16];
  while (const size_t size = std::fread(block, 1, sizeof(block), stdin)) {
    bytes.insert(bytes.end(), block, block + size);
  }
  return bytes;
}

// Carries out the request on standard input in each of its ways; the memory as each has left it
// goes to standard output. Call is a Run with run(name of an operator).
template <typename Call>
void serve(std::string_view op) {
  const Bytes bytes = standard_input();
  Request request(bytes);
  std::vector<std::pair<Order, int64_t>> runs(request.integer());
  for (auto& [order, grid] : runs) {
    order = static_cast<Order>(request.integer());
    grid = request.integer();
  }
  Device device;
  for (const auto& [order, grid] : runs) {
    device.set_order(order);
    Call call(request, device, grid);
    call.run(op);
    call.write_memory();
  }
  if constexpr (races::kOn) races::finish();
}

}  // namespace host_cuda
