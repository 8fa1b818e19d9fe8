// CUDA's execution model on the host, so that kernels run without a GPU and under sanitizers.
// Blocks run one after another; those of a cooperative launch each until it waits for others. The
// threads of a block are fibers: one runs at a time, up to the next barrier or warp operation. A
// barrier or warp operation that some threads never reach, or reach at another place, is an error
// and ends the process; so are blocks that meet at different places or wait for ever, and a thread
// that leaves with copies under way. Include this before any kernel.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
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
  void begin_with(void (*function)(), char* stack) {
    getcontext(&beginning_);
    beginning_.uc_stack.ss_sp = stack;
    beginning_.uc_stack.ss_size = kStackSize;
    makecontext(&beginning_, function, 0);
    begins_ = true;
  }

  [[gnu::noinline, HOST_CUDA_UNSEEN]] static void change(Context& from, Context& to) {
    if (__builtin_setjmp(from.place_) == 0) to.resume();
  }

 private:
  [[noreturn, gnu::noinline, HOST_CUDA_UNSEEN]] void resume() {
    if (!begins_) __builtin_longjmp(place_, 1);
    begins_ = false;
    setcontext(&beginning_);
    std::abort();
  }

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

inline bool same(const Site& a, const Site& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

[[noreturn, gnu::noinline]] inline void fail(const char* what, const Site& site) {
  std::fprintf(stderr, "host_cuda: block %u: %s (%s:%u)\n", blockIdx.x, what, site.file_name(),
               static_cast<unsigned>(site.line()));
  std::_Exit(1);
}

// The number of the fault that is switched on of those which a test has put into the sources, or
// -1: see mutants.py.
inline int& chosen_mutant() {
  static int chosen = -1;
  return chosen;
}

inline bool mutant(int number) { return number == chosen_mutant(); }

// Static shared memory: the thread-local storage of the program, or the library, that this is
// compiled into.
inline std::span<std::byte> shared_memory() {
  static thread_local volatile char any;  // a library has no such storage before it is used
  static_cast<void>(any);
  using Memory = std::span<std::byte>;
  const auto find = [](dl_phdr_info* module, size_t, void* result) {
    const auto here = reinterpret_cast<uintptr_t>(&shared_memory) - module->dlpi_addr;
    const std::span segments(module->dlpi_phdr, module->dlpi_phnum);
    const bool ours = std::ranges::any_of(segments, [&](const auto& segment) {
      return segment.p_type == PT_LOAD && here - segment.p_vaddr < segment.p_memsz;
    });
    for (const auto& segment : segments) {
      if (!ours || segment.p_type != PT_TLS || module->dlpi_tls_data == nullptr) continue;
      auto* const begin = static_cast<std::byte*>(module->dlpi_tls_data);
      *static_cast<Memory*>(result) = {begin, segment.p_memsz};
    }
    return int{ours};
  };
  Memory found;
  dl_iterate_phdr(find, &found);
  return found;
}

// Kernels as nvcc made them, translated from PTX: see ptx. By their mangled names; arguments are
// given by where they are.
using Translated = void(char** arguments);

inline std::map<std::string_view, Translated*>& translated() {
  static std::map<std::string_view, Translated*> kernels;
  return kernels;
}

inline std::string name_of(const void* kernel) {
  Dl_info symbol{};
  dladdr(kernel, &symbol);
  return symbol.dli_sname == nullptr ? "a local kernel" : symbol.dli_sname;
}

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
    begin(grid, block, thread_of(kernel, arguments...));
    block_ = &blocks_of(1).front();
    each_in_order(grid, [&](int64_t index) {
      enter(index, block, /*shared_bytes=*/0);
      if (!run_block()) fail("a block waits for others, of which none need be running", waiting());
      return true;
    });
  }

  // A cooperative launch, all of whose blocks are there at the same time.
  template <typename... Parameters, typename... Arguments>
  void launch_together(void (*kernel)(Parameters...), int64_t grid, int block, int64_t shared_bytes,
                       const Arguments&... arguments) {
    begin(grid, block, thread_of(kernel, arguments...));
    const std::span<Block> blocks = blocks_of(grid);
    meetings_.clear();
    for (int64_t index = 0; index < grid; ++index) {
      block_ = &blocks[index];
      enter(index, block, shared_bytes);
      leave();
    }
    bool running = true;
    while (running) {
      running = progress_ = false;
      each_in_order(grid, [&](int64_t index) {
        if (blocks[index].done) return true;
        enter_again(blocks[index], index);
        blocks[index].done = run_block();
        running = running || !blocks[index].done;
        leave();
        return true;
      });
      if (running && !progress_) fail("blocks wait for one another for ever", waiting());
    }
    for (Block& other : blocks) {
      other.dynamic.reset();
      if (other.meetings != meetings_.size()) {
        fail("a block has left the kernel where others meet", meetings_[other.meetings]);
      }
    }
  }

  std::byte* dynamic_shared() { return block_->dynamic.get(); }

  // The running block is where all blocks meet, each as often as every other and at the same place.
  // Some then give way to all others, so that what they have yet to read may change.
  [[gnu::noinline]] void block_arrives(const Site& site) {
    const size_t meeting = block_->meetings++;
    if (meeting == meetings_.size()) meetings_.push_back(site);
    if (!same(site, meetings_[meeting])) fail("blocks meet at different places", site);
    gives_way_ = order_ == Order::kDescending || (order_ == Order::kShuffled && random_() % 2 == 0);
    if (gives_way_) wait(State::kReady, site);
  }

  [[gnu::noinline]] void copy_async(void* to, const void* from, int bytes) {
    const auto misaligned = [](const void* p) {
      return reinterpret_cast<uintptr_t>(p) % kCopySize != 0;
    };
    if (misaligned(to) || (bytes > 0 && misaligned(from)) || bytes < 0 || bytes > kCopySize) {
      fail("a misaligned copy", Site::current());
    }
    std::memset(to, static_cast<int>(kPoison), kCopySize);
    if constexpr (races::kOn) {
      races::begin_copy(to, kCopySize, from, bytes, __builtin_return_address(0));
    }
    running().begun.push_back(
        {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes});
  }

  void end_group() { end_group(running()); }

  // Copies are made as late as can be.
  [[gnu::noinline]] void wait_for_group(size_t later) {
    for (auto& groups = running().groups; groups.size() > later; groups.pop_front()) {
      for (const Copy& copy : groups.front()) {
        if constexpr (races::kOn) {
          races::end_copy(copy.to, kCopySize, copy.from, copy.bytes, __builtin_return_address(0));
        }
        std::memcpy(copy.to, copy.from, copy.bytes);
        std::memset(copy.to + copy.bytes, 0, kCopySize - copy.bytes);
      }
    }
  }

  // The running thread waits until all threads of its block, or warp, wait at `site`.
  [[gnu::noinline]] void wait(State state, const Site& site) {
    Thread& thread = running();
    thread.state = state;
    thread.site = site;
    switch_stack(thread.context, scheduler_, scheduler_stack_, scheduler_stack_size_);
  }

  // Returns the values that each lane of the running thread's warp gives.
  template <typename T>
  [[gnu::noinline]] Lanes<T> exchanged(unsigned mask, T value, const Site& site) {
    static_assert(sizeof(T) <= kMostGiven);
    if (mask != ~0u) fail("a warp operation of some lanes only", site);
    Thread& thread = running();
    const unsigned slot = thread.operations++ % 2;
    std::memcpy(&thread.given[slot], &value, sizeof(T));
    wait(State::kAtWarpOperation, site);
    return {&block_->threads[threadIdx.x / kWarpSize * kWarpSize], slot};
  }

 private:
  Thread& running() { return block_->threads[threadIdx.x]; }

  // Where a thread waits for something that no thread of its block can bring about.
  Site waiting() const {
    for (int i = 0; i < block_->size; ++i) {
      const Thread& thread = block_->threads[i];
      if (thread.state == State::kPausing) return thread.site;
    }
    return Site::current();
  }

  // f(0), f(1), ... f(count - 1), in the order asked for, until one is false, which is the result.
  template <typename F>
  bool each_in_order(int64_t count, const F& f) {
    if (order_ == Order::kShuffled) {
      std::vector<int64_t> indices(count);
      std::iota(indices.begin(), indices.end(), int64_t{0});
      std::shuffle(indices.begin(), indices.end(), random_);
      return std::ranges::all_of(indices, f);
    }
    const bool up = order_ == Order::kAscending;
    for (int64_t i = 0; i < count; ++i) {
      if (!f(up ? i : count - 1 - i)) return false;
    }
    return true;
  }

  void begin(int64_t grid, int block, std::function<void()> kernel) {
    kernel_ = std::move(kernel);
    gridDim = {static_cast<unsigned>(grid), 1, 1};
    blockDim = {static_cast<unsigned>(block), 1, 1};
    if constexpr (races::kOn) races::begin_launch(grid);
  }

  // Of a block that begins.
  void enter(int64_t index, int threads, int64_t shared_bytes) {
    blockIdx = {static_cast<unsigned>(index), 0, 0};
    std::ranges::fill(shared_memory(), kPoison);
    watch_shared(races::Space::kStaticShared, shared_memory());
    if (block_->size < threads) add_threads(threads);
    for (int i = 0; i < threads; ++i) block_->threads[i].state = State::kReady;
    if (shared_bytes == 0) return;
    constexpr size_t kAlignment = 128;
    const size_t size = (shared_bytes + kAlignment - 1) / kAlignment * kAlignment;
    block_->dynamic.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, size)));
    std::memset(block_->dynamic.get(), static_cast<int>(kPoison), size);
    watch_shared(races::Space::kDynamicShared, {block_->dynamic.get(), size});
  }

  static void watch_shared(races::Space space, std::span<const std::byte> memory) {
    if constexpr (races::kOn) races::watch(space, memory.data(), memory.size());
  }

  // The static shared memory of the block goes with it.
  void leave() { block_->shared.assign(shared_memory().begin(), shared_memory().end()); }

  void enter_again(Block& block, int64_t index) {
    block_ = &block;
    blockIdx = {static_cast<unsigned>(index), 0, 0};
    std::ranges::copy(block_->shared, shared_memory().begin());
    for (int i = 0; i < block_->size; ++i) {
      Thread& thread = block_->threads[i];
      if (thread.state == State::kPausing) thread.state = State::kReady;
    }
  }

  // Until the block has ended: true; or until nothing goes on in it but pauses, or it gives way to
  // other blocks: false.
  bool run_block() {
    const int size = static_cast<int>(blockDim.x);
    const int together = order_ == Order::kShuffled ? size : kWarpSize;
    do {
      const bool all = each_in_order((size + together - 1) / together, [&](int64_t group) {
        const int first = static_cast<int>(group) * together;
        const int count = std::min(together, size - first);
        do {
          if (!run_threads(first, count)) return false;
        } while (release_warps(first, count));
        return true;
      });
      if (!all) return false;
    } while (release_block(size));
    return block_->threads[0].state == State::kDone;
  }

  // False if the block is to give way.
  bool run_threads(int first, int count) {
    return each_in_order(count, [&](int64_t index) {
      Thread& thread = block_->threads[first + index];
      if (thread.state != State::kReady) return true;
      threadIdx = {static_cast<unsigned>(first + index), 0, 0};
      if constexpr (races::kOn) races::resume(blockIdx.x, threadIdx.x);
      switch_stack(scheduler_, thread.context, thread.stack, kStackSize);
      if constexpr (races::kOn) races::pause();
      progress_ = progress_ || thread.state != State::kPausing;
      if (thread.state == State::kDone) end_copies(thread);
      return !std::exchange(gives_way_, false);
    });
  }

  static void end_copies(Thread& thread) {
    end_group(thread);
    for (const std::vector<Copy>& group : thread.groups) {
      if (!group.empty()) fail("a thread has left the kernel with copies under way", thread.site);
    }
    thread.groups.clear();
  }

  static void end_group(Thread& thread) {
    thread.groups.push_back(std::exchange(thread.begun, {}));
  }

  // Lets warps go on whose threads have met.
  bool release_warps(int begin, int count) {
    bool released = false;
    for (int first = begin; first < begin + count; first += kWarpSize) {
      const int lanes = std::min(kWarpSize, begin + count - first);
      const auto waits = [](const Thread& t) { return t.state == State::kAtWarpOperation; };
      const Thread* const lane = &block_->threads[first];
      if (std::none_of(lane, lane + lanes, waits)) continue;
      if (lanes < kWarpSize) fail("a warp operation in a warp of fewer lanes", lane->site);
      release(first, lanes, State::kAtWarpOperation);
      released = true;
    }
    return released;
  }

  // Lets threads go on that have met; false if all have left the kernel, or one pauses.
  bool release_block(int size) {
    const Thread* const begin = block_->threads.get();
    const auto done = [](const Thread& t) { return t.state == State::kDone; };
    const auto pauses = [](const Thread& t) { return t.state == State::kPausing; };
    if (std::all_of(begin, begin + size, done)) return false;
    if (std::any_of(begin, begin + size, pauses)) return false;
    release(0, size, State::kAtBarrier);
    if constexpr (races::kOn) races::block_synchronized(blockIdx.x);
    return true;
  }

  void release(int first, int count, State state) {
    Thread* const begin = &block_->threads[first];
    const Thread* const waiting =
        std::find_if(begin, begin + count, [&](const Thread& t) { return t.state == state; });
    for (Thread* thread = begin; thread != begin + count; ++thread) {
      if (thread->state == State::kDone) {
        fail("a thread has left the kernel where others wait for it", waiting->site);
      }
      if (thread->state != state || !same(thread->site, waiting->site)) {
        fail("threads wait for one another at different places", waiting->site);
      }
      thread->state = State::kReady;
    }
  }

  // So many, of which none has begun. They keep their threads from launch to launch.
  std::span<Block> blocks_of(int64_t grid) {
    if (blocks_.size() < static_cast<size_t>(grid)) blocks_.resize(grid);
    const std::span<Block> blocks(blocks_.data(), grid);
    for (Block& block : blocks) {
      block.meetings = 0;
      block.done = false;
    }
    return blocks;
  }

  // In place of fewer, which have ended. Their stacks are not of the heap, of which ASan would mark
  // every byte, and stay to the end of the process, since what it has marked there stays, too.
  void add_threads(int count) {
    void* const stacks = mmap(nullptr, count * kStackSize, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) fail("there is no memory for its stacks", Site::current());
    block_->threads = std::make_unique<Thread[]>(count);
    block_->size = count;
    for (int i = 0; i < count; ++i) {
      Thread& thread = block_->threads[i];
      thread.stack = static_cast<char*>(stacks) + i * kStackSize;
      ASAN_POISON_MEMORY_REGION(thread.stack, kStackGuard);
      thread.context.begin_with([] { current_->run_thread(); }, thread.stack);
    }
  }

  // The life of a fiber: the kernel, once per block.
  void run_thread() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_stack_size_);
    while (true) {
      kernel_();
      wait(State::kDone, Site::current());
    }
  }

  static void switch_stack(Context& from, Context& to, const void* stack, size_t size) {
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, stack, size);
    Context::change(from, to);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  }

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
