// Uses of CUDA's runtime with one fault each, by which the tests know that launchers/runtime.cpp
// sees it. Usage: runtime_faults NAME; prints the name of the last error.
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>

#include "launchers/runtime.cpp"

namespace {

constexpr int kSmaller = 1, kNotCooperative = 3;
constexpr size_t kMostShared = 232448;  // of an H100, dynamic and static

void fill(float* data) { data[threadIdx.x] = 1.0f; }

struct Options {
  unsigned blocks = 1, threads = 32;
  size_t shared_bytes = 0;
  bool together = false;
  float* data = nullptr;
};

cudaError_t start(const Options& options, cudaStream_t on = stream()) {
  cudaLaunchAttribute together{cudaLaunchAttributeCooperative, {1}};
  const cudaLaunchConfig_t config{{options.blocks}, {options.threads}, options.shared_bytes, on,
                                  &together,        options.together};
  return cudaLaunchKernelEx(&config, fill, options.data);
}

cudaError_t ask_for(size_t shared_bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(fill),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

float* taken() { return static_cast<float*>(take(32 * sizeof(float))); }

void capture(void (*call)()) {
  host_cuda_use_stream(host_cuda_new_stream());
  host_cuda_begin_capture();
  call();
  if (host_cuda_end_capture() >= 0) std::abort();  // the capture is invalid
}

void allocate() {
  void* memory = nullptr;
  cudaMalloc(&memory, 8);
}

const std::map<std::string, void (*)()> kFaults = {
    {"none",
     [] {
       float* const data = taken();
       start({.data = data});
       synchronize(/*last_first=*/false);
       if (data[31] != 1.0f) std::abort();
       give_back(data);
     }},
    {"no_blocks", [] { start({.blocks = 0}); }},
    {"too_many_blocks", [] { start({.blocks = 1u << 31}); }},
    {"no_threads", [] { start({.threads = 0}); }},
    {"too_many_threads", [] { start({.threads = 1025}); }},
    {"shared_memory_not_asked_for", [] { start({.shared_bytes = 48 << 10}); }},
    {"shared_memory_asked_for_elsewhere",
     [] {
       ask_for(64 << 10);
       use_device(kSmaller);
       start({.shared_bytes = 64 << 10});
     }},
    {"more_shared_memory_than_asked_for",
     [] {
       ask_for(64 << 10);
       start({.shared_bytes = (64 << 10) + 1});
     }},
    {"more_shared_memory_than_there_is", [] { ask_for(kMostShared); }},
    {"blocks_that_do_not_fit", [] { start({.blocks = 132 * 8 + 1, .together = true}); }},
    {"blocks_that_shared_memory_keeps_out",
     [] {
       ask_for(kMostShared - kStaticShared);
       start({.blocks = 133, .shared_bytes = kMostShared - kStaticShared, .together = true});
     }},
    {"blocks_that_cannot_wait",
     [] {
       use_device(kNotCooperative);
       start({.together = true});
     }},
    {"stream_of_another_device",
     [] {
       const cudaStream_t elsewhere = host_cuda_new_stream();
       use_device(kSmaller);
       host_cuda_use_stream(elsewhere);
       start({});
     }},
    {"a_stream_that_is_gone",
     [] {
       const cudaStream_t gone = host_cuda_new_stream();
       host_cuda_use_stream(gone);
       cudaStreamDestroy(gone);
       start({});
     }},
    {"memory_given_back_before",
     [] {
       float* const data = taken();
       give_back(data);
       start({.data = data});
       synchronize(/*last_first=*/false);
     }},
    {"memory_of_a_later_stream",
     [] {
       host_cuda_use_stream(host_cuda_new_stream());
       float* const data = taken();
       host_cuda_use_stream(nullptr);
       start({.data = data});
       synchronize(/*last_first=*/false);
     }},
    {"host_memory_that_goes_too_early",
     [] {
       const auto host = std::make_unique<char[]>(8);
       cudaMemcpyAsync(taken(), host.get(), 8, cudaMemcpyHostToDevice, stream());
     }},
    {"wait_for_the_captured_stream", [] { capture([] { cudaStreamSynchronize(stream()); }); }},
    {"wait_in_a_capture", [] { capture([] { cudaStreamSynchronize(nullptr); }); }},
    {"launch_in_an_invalid_capture",
     [] {
       host_cuda_use_stream(host_cuda_new_stream());
       host_cuda_begin_capture();
       allocate();
       start({});
     }},
    {"memory_of_a_graph_given_back_before",
     [] {
       host_cuda_use_stream(host_cuda_new_stream());
       host_cuda_begin_capture();
       float* const data = taken();
       give_back(data);
       start({.data = data});
       host_cuda_replay(host_cuda_end_capture());
       synchronize(/*last_first=*/false);
     }},
};

}  // namespace

int main(int, char** arguments) {
  kFaults.at(arguments[1])();
  synchronize(/*last_first=*/false);
  std::cout << cudaGetErrorName(cudaGetLastError());
}
