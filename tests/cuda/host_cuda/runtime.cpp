// CUDA's runtime on the host: streams are queues, a capture is a list that can be done again.
#include "runtime.h"

#include <sanitizer/asan_interface.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <ranges>
#include <set>
#include <string>
#include <vector>

namespace host_cuda {

struct Capture {
  unsigned long long id;
  bool valid = true;
  std::vector<Work> nodes;
};

struct Stream {
  int device;
  unsigned long long id;
  std::deque<Work> work;
  std::optional<Capture> capture;
};

struct Handle {
  Stream* stream = nullptr;
};

namespace {

constexpr int kMostThreads = 1024;  // of a block
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
constexpr size_t kArgumentBytes = 4096;      // of a kernel, on a driver for CUDA 12.0
constexpr size_t kSharedUnasked = 48 << 10;  // bytes that a block may have without asking
constexpr size_t kSharedOfSystem = 1 << 10;  // of each block
constexpr size_t kStaticShared = 2 << 10;    // of a kernel: a persistent one's, by ptxas
constexpr int kRegistersOfThread = 255;      // the most: those of a kernel are not known here
constexpr int kL2Bytes = 50 << 20;

struct Properties {
  int multiprocessors, shared_bytes, capability;
  bool cooperative;
  int registers;  // of a multiprocessor
};

struct Memory {  // of torch's allocator
  size_t bytes;
  Stream* stream;
  unsigned long long capture;  // 0: none
};

struct Runtime {
  Device kernels;
  std::vector<Properties> devices;
  std::deque<Stream> streams;            // all there ever were
  std::vector<Stream*> default_streams;  // by device
  std::vector<cudaStream_t> current;     // by device
  std::deque<Handle> handles;
  std::vector<std::vector<Work>> graphs;
  std::map<void*, Memory> memory;
  std::map<std::pair<int, const void*>, size_t> shared;  // dynamic bytes that a kernel may have
  int device = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  cudaError_t last_error = cudaSuccess;
  unsigned long long captures = 0;
  int driver_version = CUDART_VERSION;
  size_t free_memory = std::numeric_limits<size_t>::max();
  int64_t allocations = 0, launches = 0;
  std::set<const void*> launched;
  int64_t last_blocks = 0, last_argument_bytes = 0, last_shared_bytes = 0;  // of the last launch
  bool waits = true;

  int add_device(const Properties& properties) {
    const int device = static_cast<int>(devices.size());
    devices.push_back(properties);
    default_streams.push_back(&new_stream(device));
    current.push_back(nullptr);
    return device;
  }

  const Properties& properties() const { return devices.at(device); }

  Stream& new_stream(int device) { return streams.emplace_back(device, streams.size() + 1); }
};

Runtime& runtime() {
  static Runtime& all = *new Runtime;
  return all;
}

cudaError_t failed(cudaError_t error) { return runtime().last_error = error; }

// Null if the handle is of no stream.
Stream* stream_of(cudaStream_t handle) {
  Runtime& all = runtime();
  return handle == nullptr ? all.default_streams.at(all.device) : handle->stream;
}

Stream& current() { return *stream_of(runtime().current[runtime().device]); }

void run(Stream& stream) {
  while (!stream.work.empty()) {
    const Work work = std::move(stream.work.front());
    stream.work.pop_front();
    work();
  }
}

void synchronize(bool last_first) {
  auto& streams = runtime().streams;
  for (size_t i = 0; i < streams.size(); ++i) {
    run(last_first ? streams[streams.size() - 1 - i] : streams[i]);
  }
}

cudaError_t put(Stream* stream, Work work) {
  if (stream == nullptr || stream->device != runtime().device) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (stream->capture && !stream->capture->valid) return failed(cudaErrorStreamCaptureInvalidated);
  if (stream->capture) {
    stream->capture->nodes.push_back(std::move(work));
  } else {
    stream->work.push_back(std::move(work));
  }
  return cudaSuccess;
}

// Tells whether a call may not be made while a stream is being captured, which it also ends; this
// thread can say that it knows better.
bool spoils_capture() {
  if (runtime().mode == cudaStreamCaptureModeRelaxed) return false;
  bool spoilt = false;
  for (Stream& stream : runtime().streams) {
    if (!stream.capture) continue;
    stream.capture->valid = false;
    spoilt = true;
  }
  return spoilt;
}

// Blocks of a kernel that a multiprocessor holds.
int resident_blocks(size_t threads, size_t shared_bytes) {
  const size_t shared = runtime().properties().shared_bytes + kSharedOfSystem;
  const size_t by_shared = shared / (shared_bytes + kStaticShared + kSharedOfSystem);
  const size_t by_threads = kThreadsPerMultiprocessor / threads;
  const size_t by_registers =
      runtime().properties().registers / (threads * (kRegistersOfThread + 1));
  return static_cast<int>(std::min({by_shared, by_threads, by_registers}));
}

cudaError_t refusal(const cudaLaunchConfig_t& config, const void* kernel, size_t argument_bytes) {
  const Properties& device = runtime().properties();
  const auto [blocks, y, z] = config.gridDim;
  const unsigned threads = config.blockDim.x;
  if (blocks < 1 || blocks > kMostBlocks || threads < 1 || threads > kMostThreads) {
    return cudaErrorInvalidConfiguration;
  }
  if (argument_bytes > kArgumentBytes && runtime().driver_version < 12010) {
    return cudaErrorNotSupported;
  }
  const auto asked = runtime().shared.find({runtime().device, kernel});
  const size_t allowed =
      asked == runtime().shared.end() ? kSharedUnasked - kStaticShared : asked->second;
  if (config.dynamicSmemBytes > allowed) return cudaErrorInvalidValue;
  if (config.numAttrs == 0) return cudaSuccess;
  if (!device.cooperative) return cudaErrorNotSupported;
  const int64_t most =
      int64_t{resident_blocks(threads, config.dynamicSmemBytes)} * device.multiprocessors;
  return blocks > most ? cudaErrorCooperativeLaunchTooLarge : cudaSuccess;
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, size_t argument_bytes,
                   Work work) {
  const cudaError_t error = refusal(config, kernel, argument_bytes);
  if (error != cudaSuccess) return failed(error);
  if (config.stream != runtime().current[runtime().device]) {
    fail("a kernel is launched on another stream than torch's current one", Site::current());
  }
  ++runtime().launches;
  runtime().launched.insert(kernel);
  runtime().last_blocks = config.gridDim.x;
  runtime().last_argument_bytes = static_cast<int64_t>(argument_bytes);
  runtime().last_shared_bytes = static_cast<int64_t>(config.dynamicSmemBytes);
  return put(stream_of(config.stream), std::move(work));
}

void use_device(int device) { runtime().device = device; }

int device() { return runtime().device; }

cudaStream_t stream() { return runtime().current[runtime().device]; }

void* take(size_t bytes) {
  constexpr size_t kAlignment = 512;
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, std::max<size_t>(bytes, 1)) != 0) std::abort();
  watch_tensor(memory, bytes);
  ASAN_POISON_MEMORY_REGION(memory, bytes);
  Stream& stream = current();
  put(&stream, [=] {
    ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
    std::memset(memory, static_cast<int>(kPoison), bytes);
  });
  runtime().memory[memory] = {bytes, &stream, stream.capture ? stream.capture->id : 0};
  return memory;
}

void give_back(void* memory) {
  const auto [bytes, stream, capture] = runtime().memory.extract(memory).mapped();
  if (capture == 0) {
    stream->work.push_back([=] {
      forget_tensor(memory);
      std::free(memory);
    });
  } else if (stream->capture && stream->capture->id == capture) {
    put(stream, [=] { ASAN_POISON_MEMORY_REGION(memory, bytes); });
  }
}

void watch_tensor(const void* memory, size_t bytes) {
  if constexpr (races::kOn) races::watch(races::Space::kDevice, memory, bytes);
}

void forget_tensor(const void* memory) {
  if constexpr (races::kOn) races::forget(memory);
}

void enqueue(Work work) { put(&current(), std::move(work)); }

void end_of_operator() {
  if (runtime().last_error != cudaSuccess) {
    const std::string name = cudaGetErrorName(runtime().last_error);
    fail(("nobody has asked for " + name).c_str(), Site::current());
  }
  if (runtime().waits) synchronize(/*last_first=*/false);
}

bool is_capturing() { return current().capture.has_value(); }

}  // namespace host_cuda

using namespace host_cuda;

// --- what tests ask of it, about torch's current device and stream -------------------------------

#define EXPORTED extern "C" [[gnu::visibility("default")]]

EXPORTED void host_cuda_set_order(int64_t order) {
  runtime().kernels.set_order(static_cast<Order>(order));
}

// Returns the number of a new device.
EXPORTED int host_cuda_new_device(int multiprocessors, int shared_bytes, int capability,
                                  bool cooperative, int registers) {
  return runtime().add_device({multiprocessors, shared_bytes, capability, cooperative, registers});
}

EXPORTED void host_cuda_use_device(int device) { use_device(device); }

EXPORTED cudaStream_t host_cuda_new_stream() {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

EXPORTED void host_cuda_destroy_stream(cudaStream_t stream) { cudaStreamDestroy(stream); }

EXPORTED void host_cuda_use_stream(cudaStream_t stream) {
  runtime().current[runtime().device] = stream;
}

// Does what waits on all streams, of the last one first if so asked.
EXPORTED void host_cuda_synchronize(bool last_first) { synchronize(last_first); }

// Sets whether the work of an operator is done at its end.
EXPORTED void host_cuda_wait_for_operators(bool wait) { runtime().waits = wait; }

EXPORTED void host_cuda_begin_capture() { current().capture = Capture{.id = ++runtime().captures}; }

// The number of a graph; -1 if the capture was invalidated.
EXPORTED int host_cuda_end_capture() {
  const Capture capture = *std::exchange(current().capture, std::nullopt);
  if (!capture.valid) return -1;
  runtime().graphs.push_back(capture.nodes);
  return static_cast<int>(runtime().graphs.size()) - 1;
}

EXPORTED void host_cuda_replay(int graph) {
  for (const Work& node : runtime().graphs[graph]) enqueue(node);
}

// The bytes that cudaMalloc can still give, and how often it has given some.
EXPORTED void host_cuda_set_free_memory(int64_t bytes) { runtime().free_memory = bytes; }
EXPORTED int64_t host_cuda_allocations() { return runtime().allocations; }

// The version of CUDA that the driver is for, such as 12010.
EXPORTED void host_cuda_set_driver_version(int version) { runtime().driver_version = version; }

// Kernels since the process began.
EXPORTED int64_t host_cuda_launches() { return runtime().launches; }

// Of the last launch.
EXPORTED int64_t host_cuda_blocks() { return runtime().last_blocks; }
EXPORTED int64_t host_cuda_argument_bytes() { return runtime().last_argument_bytes; }
EXPORTED int64_t host_cuda_shared_bytes() { return runtime().last_shared_bytes; }

// The kernels of these, by their mangled names.
EXPORTED const char* host_cuda_kernels() {
  static std::string names;
  names.clear();
  for (const void* const kernel : runtime().launched) names += name_of(kernel) + "\n";
  return names.c_str();
}

// From now on the mutant of this number is on; -1: none.
EXPORTED void host_cuda_use_mutant(int number) { chosen_mutant() = number; }

// What the race detector has said since it was asked last.
EXPORTED const char* host_cuda_races() {
  static std::string said;
  said.clear();
  if constexpr (races::kOn) said = races::finish();
  return said.c_str();
}

// --- what launchers ask of it --------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define NAME(name, number) \
  case name:               \
    return #name;
    HOST_CUDA_ERRORS(NAME)
#undef NAME
  }
  return "unknown";
}

cudaError_t cudaGetLastError() { return std::exchange(runtime().last_error, cudaSuccess); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = runtime().driver_version;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  const int count = static_cast<int>(runtime().devices.size());
  if (device < 0 || device >= count) return failed(cudaErrorInvalidDevice);
  const Properties& of = runtime().devices[device];
  const int values[] = {of.multiprocessors, of.shared_bytes,    kL2Bytes,
                        of.capability / 10, of.capability % 10, of.cooperative};
  *value = values[which];
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->sharedSizeBytes = kStaticShared;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  const int most = runtime().properties().shared_bytes - static_cast<int>(kStaticShared);
  if (value < 0 || value > most) return failed(cudaErrorInvalidValue);
  runtime().shared[{device(), kernel}] = value;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          size_t shared_bytes) {
  *blocks = resident_blocks(threads, shared_bytes);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (spoils_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (bytes > runtime().free_memory) return failed(cudaErrorMemoryAllocation);
  runtime().free_memory -= bytes;
  ++runtime().allocations;
  *memory = std::malloc(bytes);
  watch_tensor(*memory, bytes);
  std::memset(*memory, static_cast<int>(kPoison), bytes);
  return cudaSuccess;
}

// Whatever memory it comes from, the copy is made as late as can be.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return put(stream_of(stream), [=] { std::memcpy(to, from, bytes); });
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  return put(stream_of(stream), [=] { std::memset(memory, value, bytes); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  auto& handles = runtime().handles;
  const auto unused = std::ranges::find(handles, nullptr, &Handle::stream);
  *stream = unused == handles.end() ? &handles.emplace_back() : &*unused;
  (*stream)->stream = &runtime().new_stream(device());
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Stream* const of = stream_of(stream);
  if (of == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (of->capture) of->capture->valid = false;
  if (of->capture || spoils_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  run(*of);
  return cudaSuccess;
}

// Its work is done all the same, and its handle free for another stream.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr || stream->stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  stream->stream = nullptr;
  return cudaSuccess;
}

// Not of a stream that is being captured: so it is on an H100 under CUDA 13.0.
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  Stream* const of = stream_of(stream);
  if (of->capture) {
    of->capture->valid = false;
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  *id = of->id;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const auto& capture = stream_of(stream)->capture;
  *status = !capture         ? cudaStreamCaptureStatusNone
            : capture->valid ? cudaStreamCaptureStatusActive
                             : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, runtime().mode);
  return cudaSuccess;
}
