// Runs a gradient operation on the kernels of csrc/cuda, on the host. __init__.py writes a request
// to standard input: the ways to run the call, the memory of its tensors, and the call. To standard
// output goes that memory as each run has left it.
#include "simt.h"
//
#include <sanitizer/asan_interface.h>

#include <cstddef>
#include <utility>

#include "cuda/accumulate.cuh"
#include "cuda/norm.cuh"
#include "cuda/scale.cuh"
#include "cuda/table.h"

namespace {

using namespace accumext;
using namespace accumext::cuda;
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
  }
  explicit Memory(const Bytes& content) : Memory(content.size()) {
    std::copy(content.begin(), content.end(), data());
  }
  Memory(const Memory&) = delete;

  ~Memory() {
    __asan_unpoison_memory_region(begin_, capacity_);
    const auto written = [](std::byte byte) { return byte != kUnwritten; };
    if (std::any_of(begin_, data(), written) || std::any_of(end(), begin_ + capacity_, written)) {
      host_cuda::fail("a kernel wrote beside a tensor", host_cuda::Site::current());
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

// f(Norm of p)
template <typename F>
void with_norm(double p, const F& f) {
  switch (norm_kind(p)) {
    case NormKind::kAbs:
      return f(Norm<NormKind::kAbs>{p});
    case NormKind::kSquares:
      return f(Norm<NormKind::kSquares>{p});
    case NormKind::kPowers:
      return f(Norm<NormKind::kPowers>{p});
    case NormKind::kMax:
      return f(Norm<NormKind::kMax>{p});
    case NormKind::kMin:
      return f(Norm<NormKind::kMin>{p});
  }
}

// A list of tensors with its table and partial sums in device memory.
template <int kOperands>
struct Tensors {
  template <typename Operand>  // Span or Pair
  explicit Tensors(const std::vector<Operand>& operands)
      : packed(operands), memory(packed.bytes()), partials(packed.chunks()) {}

  Table<kOperands> table() const { return packed.at(memory.data()); }

  Packed<kOperands> packed;
  Memory memory;
  Array<Partial> partials;
};

// One run of a call, with memory of its own.
class Call {
 public:
  Call(Request request, host_cuda::Device& device, int64_t grid)
      : request_(request), device_(device), grid_(grid) {
    for (int64_t left = request_.integer(); left > 0; --left) {
      memory_.emplace_back(request_.bytes());
    }
  }

  void run() {
    const int64_t op = request_.integer();
    scale_ = scalar();
    void* const norm = pointer();
    const Dtype norm_dtype = dtype();
    outcome_ = {.norm = norm, .norm_dtype = norm_dtype};
    outcome_.found_inf = static_cast<float*>(pointer());
    outcome_.max_norm = request_.number();
    outcome_.if_finite = request_.integer() != 0;
    const bool overwrite = request_.integer() != 0;
    const double p = request_.number();
    switch (op) {
      case 0:
        return with_norm(p, [&](auto norm) { find_norm(Tensors<1>(spans()), norm); });
      case 1:
        return accumulate(Tensors<2>(pairs()), overwrite);
      case 2:
        return with_norm(p, [&](auto norm) { clip(Tensors<2>(pairs()), norm, overwrite); });
      default:
        return scale(Tensors<1>(spans()));
    }
  }

  void write_memory() const {
    for (const Memory& memory : memory_) {
      std::fwrite(memory.data(), 1, memory.end() - memory.data(), stdout);
    }
  }

 private:
  void* pointer() {  // null for memory -1
    const int64_t index = request_.integer();
    const int64_t offset = request_.integer();  // bytes
    return index < 0 ? nullptr : memory_[index].data() + offset;
  }

  Dtype dtype() { return static_cast<Dtype>(request_.integer()); }

  Scalar scalar() {
    const void* data = pointer();
    const Dtype type = dtype();
    return {.data = data, .dtype = type, .value = request_.number()};
  }

  template <int kOperands>
  Layout<kOperands> layout() {
    Layout<kOperands> dims(request_.integer());
    for (Dim<kOperands>& dim : dims) {
      dim.size = request_.integer();
      for (int64_t& stride : dim.stride) stride = request_.integer();
    }
    return simplified(dims);
  }

  std::vector<Span> spans() {
    std::vector<Span> spans(request_.integer());
    for (Span& span : spans) {
      span.data = pointer();
      span.dtype = dtype();
      span.numel = request_.integer();
      span.layout = layout<1>();
    }
    return spans;
  }

  std::vector<Pair> pairs() {
    std::vector<Pair> pairs(request_.integer());
    for (Pair& pair : pairs) {
      pair.main_grad = pointer();
      pair.main_dtype = dtype();
      pair.grad = pointer();
      pair.grad_dtype = dtype();
      pair.numel = request_.integer();
      pair.layout = layout<2>();
    }
    return pairs;
  }

  template <int kOperands, NormKind kKind>
  void find_norm(const Tensors<kOperands>& tensors, const Norm<kKind>& norm) {
    if (tensors.packed.chunks() > 0) {
      device_.launch(norm_kernel<kKind, kOperands>, grid_, kBlockSize, tensors.table(), norm,
                     scale_, tensors.partials.data());
    }
    finish(tensors, norm);
  }

  template <int kOperands, NormKind kKind>
  void finish(const Tensors<kOperands>& tensors, const Norm<kKind>& norm) {
    device_.launch(finish_kernel<kKind>, 1, kFinishThreads, tensors.partials.data(),
                   tensors.packed.chunks(), norm, outcome_);
  }

  void accumulate(const Tensors<2>& pairs, bool overwrite) {
    launch_accumulate(pairs, nullptr, overwrite, pairs.partials.data());
    finish(pairs, Norm<NormKind::kSquares>{2.0});
  }

  template <NormKind kKind>
  void clip(const Tensors<2>& pairs, const Norm<kKind>& norm, bool overwrite) {
    const Array<Clip> clip(1);
    outcome_.clip = clip.data();
    find_norm(pairs, norm);
    launch_accumulate(pairs, clip.data(), overwrite, nullptr);
  }

  void launch_accumulate(const Tensors<2>& pairs, const Clip* clip, bool overwrite,
                         Partial* partials) {
    if (pairs.packed.chunks() == 0) return;
    device_.launch(accumulate_kernel, grid_, kBlockSize, pairs.table(), scale_, clip, overwrite,
                   partials);
  }

  void scale(const Tensors<1>& spans) {
    if (spans.packed.chunks() == 0) return;
    device_.launch(scale_kernel, grid_, kBlockSize, spans.table(), scale_);
  }

  Request request_;
  host_cuda::Device& device_;
  int64_t grid_;
  std::deque<Memory> memory_;
  Scalar scale_;
  Outcome outcome_;
};

Bytes standard_input() {
  Bytes bytes;
  std::byte block[1 << 16];
  while (const size_t size = std::fread(block, 1, sizeof(block), stdin)) {
    bytes.insert(bytes.end(), block, block + size);
  }
  return bytes;
}

}  // namespace

int main() {
  const Bytes bytes = standard_input();
  Request request(bytes);
  std::vector<std::pair<host_cuda::Order, int64_t>> runs(request.integer());
  for (auto& [order, grid] : runs) {
    order = static_cast<host_cuda::Order>(request.integer());
    grid = request.integer();
  }
  host_cuda::Device device;
  for (const auto& [order, grid] : runs) {
    device.set_order(order);
    Call call(request, device, grid);
    call.run();
    call.write_memory();
  }
}
