// CUDA's execution model on the host, so that kernels run without a GPU and under sanitizers.
// Blocks run one after another; those of a cooperative launch each until it waits for others. The
// threads of a block are fibers: one runs at a time, up to the next barrier or warp operation. A
// barrier or warp operation that some threads never reach, or reach at another place, is an error
// and ends the process; so are blocks that meet at different places or wait for ever, and a thread
// that leaves with copies under way. Include this before any kernel; simt.cpp is the rest.
#pragma once

#include <sanitizer/asan_interface.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "races.h"

#define __device__
#ifdef HOST_CUDA_RACES
// Where an object is passed or returned the compiler does not report that it is read or written. So
// all that a kernel calls is inlined, but for what a GPU calls, too, and what this file does.
#define __global__ __attribute__((flatten))
#define __noinline__ __attribute__((noinline, flatten))
#else
#define __global__
#define __noinline__
#endif
// Of functions that leave their stack: the sanitizers would take them for functions that never
// return, and clear what they know of it.
#define HOST_CUDA_UNSEEN gnu::no_sanitize("address", "thread", "undefined")
#define __launch_bounds__(...)
#define __grid_constant__
// One OS thread runs all blocks, so its thread-local storage is the shared memory of one block; and
// unlike other static variables, those lie together, where shared_memory() finds them.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
inline uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {

using Site = std::source_location;

constexpr int kWarpSize = 32;
constexpr size_t kStackSize =
    1 << 19;  // bytes; frames of sanitized and of translated code are large

constexpr size_t kStackGuard = 256;  // at the end of a stack

// The order in which the threads run from one barrier to the next, and blocks after one another: a
// warp at a time, each as far as it can, or all threads in turn. The outcome of a race differs in
// another order.
enum class Order : int64_t { kAscending, kDescending, kShuffled };

enum class State { kReady, kAtBarrier, kAtWarpOperation, kPausing, kDone };

constexpr size_t kMostGiven = 48;  // bytes

// A copy to shared memory that is under way: what it writes is not there yet.
struct Copy {
  std::byte* to;
  const std::byte* from;
  int bytes;  // of kCopySize; the rest becomes 0
};
constexpr int kCopySize = 16;

// Where a fiber, or the scheduler, goes on. To save and to resume it takes no system call, which
// swapcontext() makes two of.
class Context {
 public:
  // A fiber that is to begin with `function`, once resumed.
  void begin_with(void (*function)(), char* stack);
  static void change(Context& from, Context& to);

 private:
  [[noreturn]] void resume();

  void* place_[5];
  ucontext_t beginning_;
  bool begins_ = false;
};

struct Thread {
  Context context;
  char* stack = nullptr;
  State state = State::kDone;
  Site site;                       // where it waits
  std::byte given[2][kMostGiven];  // to its last two warp operations: others may still read the
  unsigned operations = 0;         // first; how many of its warp, so far
  std::vector<Copy> begun;         // copies that are in no group yet
  std::deque<std::vector<Copy>> groups;  // of copies
};

// The values that the lanes of a warp have given to an operation, until the next but one.
template <typename T>
class Lanes {
 public:
  Lanes(const Thread* first, unsigned slot) : first_(first), slot_(slot) {}

  T operator[](int lane) const {
    T value;
    std::memcpy(&value, first_[lane].given[slot_], sizeof(T));
    return value;
  }

 private:
  const Thread* first_;
  unsigned slot_;
};

struct Block {
  std::unique_ptr<Thread[]> threads;
  int size = 0;                   // of the threads, at least those of the launch
  std::vector<std::byte> shared;  // static shared memory, while another block runs
  std::unique_ptr<std::byte, decltype(&std::free)> dynamic{nullptr, &std::free};
  size_t meetings = 0;  // with all other blocks, so far
  bool done = false;
};

[[noreturn]] void fail(const char* what, const Site& site);

// The number of the fault that is switched on of those which a test has put into the sources, or
// -1: see mutants.py.
inline int& chosen_mutant() {
  static int chosen = -1;
  return chosen;
}

inline bool mutant(int number) { return number == chosen_mutant(); }

// Static shared memory: the thread-local storage of the program, or the library, that this is
// compiled into.
std::span<std::byte> shared_memory();

// Kernels as nvcc made them, translated from PTX: see ptx. By their mangled names; arguments are
// given by where they are.
using Translated = void(char** arguments);

std::map<std::string_view, Translated*>& translated();

std::string name_of(const void* kernel);

// A thread of a kernel: the translated one if the program has any, else that of the host's
// compiler.
template <typename... Parameters, typename... Arguments>
std::function<void()> thread_of(void (*kernel)(Parameters...), const Arguments&... arguments) {
  std::tuple<std::decay_t<Parameters>...> given(arguments...);
  if (translated().empty()) return [=] { std::apply(kernel, given); };
  const std::string name = name_of(reinterpret_cast<const void*>(kernel));
  const auto found = translated().find(name);
  if (found == translated().end()) fail(name.c_str(), Site::current());
  return [=]() mutable {
    std::apply(
        [&](auto&... each) {
          char* places[] = {reinterpret_cast<char*>(&each)...};
          found->second(places);
        },
        given);
  };
}

// The bits of NaN and of an invalid bool: sums and branches over them do not go unnoticed.
constexpr std::byte kPoison{0xff};

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
    run(grid, block, thread_of(kernel, arguments...));
  }

  // A cooperative launch, all of whose blocks are there at the same time.
  template <typename... Parameters, typename... Arguments>
  void launch_together(void (*kernel)(Parameters...), int64_t grid, int block, int64_t shared_bytes,
                       const Arguments&... arguments) {
    run_together(grid, block, shared_bytes, thread_of(kernel, arguments...));
  }

  std::byte* dynamic_shared() { return block_->dynamic.get(); }

  // The running block is where all blocks meet, each as often as every other and at the same place.
  // Some then give way to all others, so that what they have yet to read may change.
  void block_arrives(const Site& site);

  void copy_async(void* to, const void* from, int bytes);
  void end_group();
  // Copies are made as late as can be.
  void wait_for_group(size_t later);

  // The running thread waits until all threads of its block, or warp, wait at `site`.
  void wait(State state, const Site& site);

  // Returns the values that each lane of the running thread's warp gives.
  template <typename T>
  Lanes<T> exchanged(unsigned mask, const T& value, const Site& site) {
    static_assert(sizeof(T) <= kMostGiven);
    const auto [first, slot] = exchanged_bytes(mask, &value, sizeof(T), site);
    return {first, slot};
  }

 private:
  void run(int64_t grid, int block, std::function<void()> kernel);
  void run_together(int64_t grid, int block, int64_t shared_bytes, std::function<void()> kernel);
  // The first lane, and which of what it gives.
  std::pair<const Thread*, unsigned> exchanged_bytes(unsigned mask, const void* value, size_t bytes,
                                                     const Site& site);
  Thread& running() { return block_->threads[threadIdx.x]; }
  // Where a thread waits for something that no thread of its block can bring about.
  Site waiting() const;
  // f(0), f(1), ... f(count - 1), in the order asked for, until one is false, which is the result.
  template <typename F>
  bool each_in_order(int64_t count, const F& f);
  void begin(int64_t grid, int block, std::function<void()> kernel);
  // Of a block that begins.
  void enter(int64_t index, int threads, int64_t shared_bytes);
  // The static shared memory of the block goes with it.
  void leave();
  void enter_again(Block& block, int64_t index);
  // Until the block has ended: true; or until nothing goes on in it but pauses, or it gives way to
  // other blocks: false.
  bool run_block();
  // False if the block is to give way.
  bool run_threads(int first, int count);
  // Lets warps go on whose threads have met.
  bool release_warps(int begin, int count);
  // Lets threads go on that have met; false if all have left the kernel, or one pauses.
  bool release_block(int size);
  void release(int first, int count, State state);
  // So many, of which none has begun. They keep their threads from launch to launch.
  std::span<Block> blocks_of(int64_t grid);
  // In place of fewer, which have ended. Their stacks are not of the heap, of which ASan would mark
  // every byte, and stay to the end of the process, since what it has marked there stays, too.
  void add_threads(int count);
  // The life of a fiber: the kernel, once per block.
  void run_thread();

  inline static Device* current_ = nullptr;
  Order order_ = Order::kAscending;
  std::mt19937 random_;
  std::vector<Block> blocks_;  // all that any launch has had
  Block* block_ = nullptr;
  std::vector<Site> meetings_;  // of all blocks of a cooperative launch
  bool progress_ = false;       // whether a thread has done more than pause
  bool gives_way_ = false;      // whether the running block does
  std::function<void()> kernel_;
  Context scheduler_;
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

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, unsigned distance,
                  host_cuda::Site site = host_cuda::Site::current()) {
  const auto values = host_cuda::Device::current().exchanged(mask, value, site);
  return values[(threadIdx.x % host_cuda::kWarpSize) ^ distance];
}

unsigned __ballot_sync(unsigned mask, int predicate,
                       host_cuda::Site site = host_cuda::Site::current());

inline int __all_sync(unsigned mask, int predicate,
                      host_cuda::Site site = host_cuda::Site::current()) {
  return __ballot_sync(mask, predicate, site) == ~0u;
}

// A thread that waits for other blocks pauses between one look and the next.
inline void __nanosleep(unsigned, host_cuda::Site site = host_cuda::Site::current()) {
  host_cuda::Device::current().wait(host_cuda::State::kPausing, site);
}

inline void __threadfence() {  // memory is the same for all
  if constexpr (host_cuda::races::kOn) host_cuda::races::fence();
}

inline unsigned long long atomicAdd(unsigned long long* sum, unsigned long long x) {
  const auto before = host_cuda::races::atomically([=] { return std::exchange(*sum, *sum + x); });
  if constexpr (host_cuda::races::kOn) host_cuda::races::counted(sum, before + x);
  return before;
}

inline unsigned atomicAdd(unsigned* sum, unsigned x) {
  return host_cuda::races::atomically([=] { return std::exchange(*sum, *sum + x); });
}

inline unsigned long long atomicMax(unsigned long long* most, unsigned long long x) {
  return host_cuda::races::atomically([=] { return std::exchange(*most, std::max(*most, x)); });
}

inline int __popc(unsigned bits) { return std::popcount(bits); }

[[noreturn]] inline void __trap(host_cuda::Site site = host_cuda::Site::current()) {
  host_cuda::fail("a trap", site);
}
