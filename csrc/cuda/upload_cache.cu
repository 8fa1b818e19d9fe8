#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "cuda/upload_cache.h"

namespace accumext::cuda {
namespace {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

// Lets this thread allocate and synchronise while a stream is being captured, as long as it leaves
// that stream alone.
class RelaxedCapture {
 public:
  RelaxedCapture() { STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Not from torch's allocator: in the memory pool of a graph that torch.compile is warming up,
// memory that outlives its call is an error. Null if the device has no more.
std::byte* allocated(size_t size) {
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, size);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // else the next launch would report it
    return nullptr;
  }
  STD_CUDA_CHECK(error);
  return static_cast<std::byte*>(memory);
}

// Copies in the order of the current stream, from pinned memory, which torch keeps until the copy
// is done: for pageable memory the host would wait.
void upload(std::byte* memory, std::string_view bytes, int32_t device) {
  const int64_t size = static_cast<int64_t>(bytes.size());
  const int64_t stride = 1;
  const Tensor staging = torch::stable::empty({size}, ScalarType::Byte, std::nullopt,
                                              Device(DeviceType::CPU), /*pin_memory=*/true);
  std::memcpy(staging.data_ptr(), bytes.data(), bytes.size());
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      memory, /*ndim=*/1, &size, &stride, /*storage_offset=*/0, aoti_torch_dtype_uint8(),
      aoti_torch_device_type_cuda(), device, &handle));
  Tensor destination(handle);
  torch::stable::copy_(destination, staging, /*non_blocking=*/true);
}

// A table for one call, from torch's allocator, which may have free memory if the device has none.
std::shared_ptr<const std::byte> borrowed(std::string_view bytes, int32_t device) {
  const int64_t size = static_cast<int64_t>(bytes.size());
  const auto owner = std::make_shared<Tensor>(torch::stable::empty(
      {size}, ScalarType::Byte, std::nullopt, Device(DeviceType::CUDA, device)));
  std::byte* const memory = static_cast<std::byte*>(owner->data_ptr());
  upload(memory, bytes, device);
  return {owner, memory};
}

// Copies at once, outside of the capture, so that a replay copies nothing.
void upload_beside_capture(std::byte* memory, std::string_view bytes) {
  const RelaxedCapture relaxed;
  cudaStream_t stream = nullptr;
  STD_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  STD_CUDA_CHECK(
      cudaMemcpyAsync(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream));
  STD_CUDA_CHECK(cudaStreamSynchronize(stream));
  STD_CUDA_CHECK(cudaStreamDestroy(stream));
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// The id is unique; a handle may be reused for a later stream. Must not be called in a capture.
unsigned long long id_of(cudaStream_t stream) {
  unsigned long long id = 0;
  STD_CUDA_CHECK(cudaStreamGetId(stream, &id));
  return id;
}

struct Resident {
  std::byte* memory;
  std::string bytes;  // its contents
};

// Tables in memory of one size on one device: of one stream, or of all graphs, most recently used
// first. The tables of graphs are uploaded before any graph runs and are never written again.
class Shelf {
 public:
  // Null if there is none.
  std::shared_ptr<Resident> find(std::string_view bytes) {
    const auto found = std::ranges::find(
        tables_, bytes, [](const auto& table) { return std::string_view(table->bytes); });
    if (found == tables_.end()) return nullptr;
    tables_.splice(tables_.begin(), tables_, found);
    return tables_.front();
  }

  void put(std::shared_ptr<Resident> table) { tables_.push_front(std::move(table)); }

  // Removes and returns the least recently used table that no call holds, if there are `count`.
  std::shared_ptr<Resident> take_oldest(size_t count) {
    if (tables_.size() < count) return nullptr;
    const auto oldest = std::find_if(tables_.rbegin(), tables_.rend(),
                                     [](const auto& table) { return table.use_count() == 1; });
    if (oldest == tables_.rend()) return nullptr;
    std::shared_ptr<Resident> table = *oldest;
    tables_.erase(std::prev(oldest.base()));
    return table;
  }

 private:
  std::list<std::shared_ptr<Resident>> tables_;
};

using Key = std::tuple<int32_t, bool, unsigned long long, size_t>;

struct Shelves {
  std::mutex mutex;
  std::map<Key, Shelf> shelves;
};

// Never destroyed: at the end of the process, CUDA may be shut down earlier.
Shelves& all_shelves() {
  static Shelves* const shelves = new Shelves;
  return *shelves;
}

}  // namespace

std::shared_ptr<const std::byte> uploaded(const std::vector<std::byte>& content, int32_t device,
                                          cudaStream_t stream) {
  constexpr size_t kTables = 16;  // on a shelf
  const std::string_view bytes(reinterpret_cast<const char*>(content.data()), content.size());
  const size_t size = std::bit_ceil(bytes.size());
  const bool captured = is_captured(stream);
  const unsigned long long id = captured ? 0 : id_of(stream);

  Shelves& all = all_shelves();
  const std::lock_guard lock(all.mutex);
  Shelf& shelf = all.shelves[{device, captured, id, size}];
  std::shared_ptr<Resident> table = shelf.find(bytes);
  if (table == nullptr) {
    if (!captured) table = shelf.take_oldest(kTables);
    if (table == nullptr) {
      std::byte* const memory = allocated(size);
      // Not in a capture: torch's allocator would reuse the memory, and a replay uploads nothing.
      if (memory == nullptr && !captured) return borrowed(bytes, device);
      STD_CUDA_CHECK(memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
      table = std::make_shared<Resident>(memory);
    }
    table->bytes = bytes;
    if (captured) {
      upload_beside_capture(table->memory, bytes);
    } else {
      upload(table->memory, bytes, device);
    }
    shelf.put(table);
  }
  return {table, table->memory};
}

}  // namespace accumext::cuda
