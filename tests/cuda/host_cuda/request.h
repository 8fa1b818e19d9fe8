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
#include <utility>
#include <vector>

#include "common/operands.h"

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
  void* pointer() {  // null for memory -1
    const int64_t index = request_.integer();
    const int64_t offset = request_.integer();  // bytes
    return index < 0 ? nullptr : memory_[index].data() + offset;
  }

  accumext::Dtype dtype() { return static_cast<accumext::Dtype>(request_.integer()); }

  Request request_;
  Device& device_;
  int64_t grid_;

 private:
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

// Carries out the request on standard input, in each of its ways; the memory as each has left it
// goes to standard output. Call is a Run with run().
template <typename Call>
void serve() {
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
    call.run();
    call.write_memory();
  }
  if constexpr (races::kOn) races::finish();
}

}  // namespace host_cuda
