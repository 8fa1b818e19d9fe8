// CUDA's execution model on the host, so that kernels run without a GPU and under sanitizers.
// Blocks run one after another. The threads of a block are fibers: one runs at a time, up to the
// next barrier or warp operation. A barrier or warp operation that some threads never reach, or
// reach at another place, is an error and ends the process. Include this before any kernel.
#pragma once

#include <link.h>
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <source_location>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
// One OS thread runs all blocks, so its thread-local storage is the shared memory of one block; and
// unlike other static variables, those lie together, where poison_shared_memory() finds them.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
inline uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {

using Site = std::source_location;

constexpr int kWarpSize = 32;
constexpr size_t kStackSize = 1 << 17;  // bytes; sanitized frames are large

// In which order the threads run from one barrier to the next, and blocks after one another. What a
// race decides comes out differently in another order.
enum class Order : int64_t { kAscending, kDescending, kShuffled };

enum class State { kReady, kAtBarrier, kAtWarpOperation, kDone };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackSize);
  State state = State::kDone;
  Site site;                // where it waits
  uint64_t given[2];        // to its last two warp operations: other lanes may still read the first
  unsigned operations = 0;  // of its warp, so far
};

inline bool same(const Site& a, const Site& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

[[noreturn]] inline void fail(const char* what, const Site& site) {
  std::fprintf(stderr, "host_cuda: block %u: %s (%s:%u)\n", blockIdx.x, what, site.file_name(),
               static_cast<unsigned>(site.line()));
  std::_Exit(1);
}

// The bits of NaN and of an invalid bool: sums and branches over them do not go unnoticed.
inline void poison_shared_memory() {
  const auto fill = [](dl_phdr_info* module, size_t, void*) {
    const auto here = reinterpret_cast<uintptr_t>(&poison_shared_memory) - module->dlpi_addr;
    bool ours = false;  // all others keep theirs
    for (int i = 0; i < module->dlpi_phnum; ++i) {
      const auto& segment = module->dlpi_phdr[i];
      ours = ours || (segment.p_type == PT_LOAD && here - segment.p_vaddr < segment.p_memsz);
    }
    for (int i = 0; ours && i < module->dlpi_phnum; ++i) {
      const auto& segment = module->dlpi_phdr[i];
      if (segment.p_type != PT_TLS || module->dlpi_tls_data == nullptr) continue;
      std::memset(module->dlpi_tls_data, 0xff, segment.p_memsz);
    }
    return int{ours};
  };
  dl_iterate_phdr(fill, nullptr);
}

class Device {
 public:
  Device() { current_ = this; }
  Device(const Device&) = delete;

  void set_order(Order order) { order_ = order; }

  static Device& current() { return *current_; }

  // kernel<<<grid, block>>>(arguments...)
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t grid, int block,
              const Arguments&... arguments) {
    kernel_ = [&] { kernel(arguments...); };
    gridDim = {static_cast<unsigned>(grid), 1, 1};
    blockDim = {static_cast<unsigned>(block), 1, 1};
    while (threads_.size() < static_cast<size_t>(block)) add_thread();
    for (const int64_t index : ordered(grid)) {
      blockIdx = {static_cast<unsigned>(index), 0, 0};
      poison_shared_memory();
      run_block(block);
    }
  }

  // The running thread waits until all threads of its block, or warp, wait at `site`.
  void wait(State state, const Site& site) {
    Thread& thread = running();
    thread.state = state;
    thread.site = site;
    switch_stack(thread.context, scheduler_, scheduler_stack_, scheduler_stack_size_);
  }

  // What each lane of the running thread's warp gives.
  template <typename T>
  std::array<T, kWarpSize> exchanged(unsigned mask, T value, const Site& site) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    if (mask != ~0u) fail("a warp operation of some lanes only", site);
    Thread& thread = running();
    const unsigned slot = thread.operations++ % 2;
    std::memcpy(&thread.given[slot], &value, sizeof(T));
    wait(State::kAtWarpOperation, site);
    std::array<T, kWarpSize> values;
    const auto lanes = threads_.begin() + threadIdx.x / kWarpSize * kWarpSize;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      std::memcpy(&values[lane], &lanes[lane].given[slot], sizeof(T));
    }
    return values;
  }

 private:
  Thread& running() { return threads_[threadIdx.x]; }

  std::vector<int64_t> ordered(int64_t count) {
    std::vector<int64_t> indices(count);
    std::iota(indices.begin(), indices.end(), int64_t{0});
    if (order_ == Order::kDescending) std::reverse(indices.begin(), indices.end());
    if (order_ == Order::kShuffled) std::shuffle(indices.begin(), indices.end(), random_);
    return indices;
  }

  void run_block(int size) {
    for (int i = 0; i < size; ++i) threads_[i].state = State::kReady;
    do {
      for (const int64_t index : ordered(size)) {
        Thread& thread = threads_[index];
        if (thread.state != State::kReady) continue;
        threadIdx = {static_cast<unsigned>(index), 0, 0};
        switch_stack(scheduler_, thread.context, thread.stack.get(), kStackSize);
      }
    } while (release(size));
  }

  // Lets threads go on that have met; false if all have left the kernel.
  bool release(int size) {
    bool released = false;
    for (int first = 0; first < size; first += kWarpSize) {
      const int lanes = std::min(kWarpSize, size - first);
      const auto waits = [](const Thread& t) { return t.state == State::kAtWarpOperation; };
      const auto begin = threads_.begin() + first;
      if (std::none_of(begin, begin + lanes, waits)) continue;
      if (lanes < kWarpSize) fail("a warp operation in a warp of fewer lanes", begin->site);
      release(first, lanes, State::kAtWarpOperation);
      released = true;
    }
    if (released) return true;
    const auto done = [](const Thread& t) { return t.state == State::kDone; };
    if (std::all_of(threads_.begin(), threads_.begin() + size, done)) return false;
    release(0, size, State::kAtBarrier);
    return true;
  }

  void release(int first, int count, State state) {
    const auto begin = threads_.begin() + first;
    const auto waiting =
        std::find_if(begin, begin + count, [&](const Thread& t) { return t.state == state; });
    for (auto thread = begin; thread != begin + count; ++thread) {
      if (thread->state == State::kDone) {
        fail("a thread has left the kernel where others wait for it", waiting->site);
      }
      if (thread->state != state || !same(thread->site, waiting->site)) {
        fail("threads wait for one another at different places", waiting->site);
      }
      thread->state = State::kReady;
    }
  }

  void add_thread() {
    ucontext_t& context = threads_.emplace_back().context;
    getcontext(&context);
    context.uc_stack.ss_sp = threads_.back().stack.get();
    context.uc_stack.ss_size = kStackSize;
    makecontext(&context, [] { current_->run_thread(); }, 0);
    context.uc_stack = {};  // swapcontext of ASan would wipe the red zones of a stack that it knows
  }

  // The life of a fiber: the kernel, once per block.
  void run_thread() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_stack_size_);
    while (true) {
      kernel_();
      wait(State::kDone, Site::current());
    }
  }

  static void switch_stack(ucontext_t& from, ucontext_t& to, const void* stack, size_t size) {
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, stack, size);
    swapcontext(&from, &to);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  }

  inline static Device* current_ = nullptr;
  Order order_ = Order::kAscending;
  std::mt19937 random_;
  std::deque<Thread> threads_;  // a context must not move
  std::function<void()> kernel_;
  ucontext_t scheduler_;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_size_ = 0;
};

}  // namespace host_cuda

// --- what kernels call ---------------------------------------------------------------------------

inline void __syncthreads(host_cuda::Site site = host_cuda::Site::current()) {
  host_cuda::Device::current().wait(host_cuda::State::kAtBarrier, site);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta,
                   host_cuda::Site site = host_cuda::Site::current()) {
  const auto values = host_cuda::Device::current().exchanged(mask, value, site);
  const unsigned lane = threadIdx.x % host_cuda::kWarpSize + delta;
  return lane < host_cuda::kWarpSize ? values[lane] : value;
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta,
                 host_cuda::Site site = host_cuda::Site::current()) {
  const auto values = host_cuda::Device::current().exchanged(mask, value, site);
  const unsigned lane = threadIdx.x % host_cuda::kWarpSize;
  return lane >= delta ? values[lane - delta] : value;
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              host_cuda::Site site = host_cuda::Site::current()) {
  const auto votes = host_cuda::Device::current().exchanged(mask, predicate != 0, site);
  unsigned ballot = 0;
  for (int lane = 0; lane < host_cuda::kWarpSize; ++lane) ballot |= unsigned{votes[lane]} << lane;
  return ballot;
}

inline int __all_sync(unsigned mask, int predicate,
                      host_cuda::Site site = host_cuda::Site::current()) {
  return __ballot_sync(mask, predicate, site) == ~0u;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }

[[noreturn]] inline void __trap(host_cuda::Site site = host_cuda::Site::current()) {
  host_cuda::fail("a trap", site);
}
