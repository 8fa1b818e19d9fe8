// The scheduler of simt.h. It is optimised, and not instrumented as the code of kernels is: what it
// does for kernels, asynchronous copies, it does by functions that the sanitizers and the race
// detector know.
#include "simt.h"

#include <dlfcn.h>
#include <link.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace host_cuda {
namespace {

bool same(const Site& a, const Site& b) {
  return a.line() == b.line() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

void watch_shared(races::Space space, std::span<const std::byte> memory) {
  if constexpr (races::kOn) races::watch(space, memory.data(), memory.size());
}

void switch_stack(Context& from, Context& to, const void* stack, size_t size) {
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, stack, size);
  Context::change(from, to);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void end_group_of(Thread& thread) { thread.groups.push_back(std::exchange(thread.begun, {})); }

void end_copies(Thread& thread) {
  end_group_of(thread);
  for (const std::vector<Copy>& group : thread.groups) {
    if (!group.empty()) fail("a thread has left the kernel with copies under way", thread.site);
  }
  thread.groups.clear();
}

}  // namespace

void Context::begin_with(void (*function)(), char* stack) {
  getcontext(&beginning_);
  beginning_.uc_stack.ss_sp = stack;
  beginning_.uc_stack.ss_size = kStackSize;
  makecontext(&beginning_, function, 0);
  begins_ = true;
}

[[gnu::noinline, HOST_CUDA_UNSEEN]] void Context::change(Context& from, Context& to) {
  if (__builtin_setjmp(from.place_) == 0) to.resume();
}

[[gnu::noinline, HOST_CUDA_UNSEEN]] void Context::resume() {
  if (!begins_) __builtin_longjmp(place_, 1);
  begins_ = false;
  setcontext(&beginning_);
  std::abort();
}

void fail(const char* what, const Site& site) {
  std::fprintf(stderr, "host_cuda: block %u: %s (%s:%u)\n", blockIdx.x, what, site.file_name(),
               static_cast<unsigned>(site.line()));
  std::_Exit(1);
}

std::span<std::byte> shared_memory() {
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

std::map<std::string_view, Translated*>& translated() {
  static std::map<std::string_view, Translated*> kernels;
  return kernels;
}

std::string name_of(const void* kernel) {
  Dl_info symbol{};
  dladdr(kernel, &symbol);
  return symbol.dli_sname == nullptr ? "a local kernel" : symbol.dli_sname;
}

void Device::run(int64_t grid, int block, std::function<void()> kernel) {
  begin(grid, block, std::move(kernel));
  block_ = &blocks_of(1).front();
  each_in_order(grid, [&](int64_t index) {
    enter(index, block, /*shared_bytes=*/0);
    if (!run_block()) fail("a block waits for others, of which none need be running", waiting());
    return true;
  });
}

void Device::run_together(int64_t grid, int block, int64_t shared_bytes,
                          std::function<void()> kernel) {
  begin(grid, block, std::move(kernel));
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

void Device::block_arrives(const Site& site) {
  const size_t meeting = block_->meetings++;
  if (meeting == meetings_.size()) meetings_.push_back(site);
  if (!same(site, meetings_[meeting])) fail("blocks meet at different places", site);
  gives_way_ = order_ == Order::kDescending || (order_ == Order::kShuffled && random_() % 2 == 0);
  if (gives_way_) wait(State::kReady, site);
}

void Device::copy_async(void* to, const void* from, int bytes) {
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

void Device::end_group() { end_group_of(running()); }

void Device::wait_for_group(size_t later) {
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

void Device::wait(State state, const Site& site) {
  Thread& thread = running();
  thread.state = state;
  thread.site = site;
  switch_stack(thread.context, scheduler_, scheduler_stack_, scheduler_stack_size_);
}

std::pair<const Thread*, unsigned> Device::exchanged_bytes(unsigned mask, const void* value,
                                                           size_t bytes, const Site& site) {
  if (mask != ~0u) fail("a warp operation of some lanes only", site);
  Thread& thread = running();
  const unsigned slot = thread.operations++ % 2;
  std::memcpy(&thread.given[slot], value, bytes);
  wait(State::kAtWarpOperation, site);
  return {&block_->threads[threadIdx.x / kWarpSize * kWarpSize], slot};
}

Site Device::waiting() const {
  for (int i = 0; i < block_->size; ++i) {
    const Thread& thread = block_->threads[i];
    if (thread.state == State::kPausing) return thread.site;
  }
  return Site::current();
}

template <typename F>
bool Device::each_in_order(int64_t count, const F& f) {
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

void Device::begin(int64_t grid, int block, std::function<void()> kernel) {
  kernel_ = std::move(kernel);
  gridDim = {static_cast<unsigned>(grid), 1, 1};
  blockDim = {static_cast<unsigned>(block), 1, 1};
  if constexpr (races::kOn) races::begin_launch(grid);
}

void Device::enter(int64_t index, int threads, int64_t shared_bytes) {
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

void Device::leave() { block_->shared.assign(shared_memory().begin(), shared_memory().end()); }

void Device::enter_again(Block& block, int64_t index) {
  block_ = &block;
  blockIdx = {static_cast<unsigned>(index), 0, 0};
  std::ranges::copy(block_->shared, shared_memory().begin());
  for (int i = 0; i < block_->size; ++i) {
    Thread& thread = block_->threads[i];
    if (thread.state == State::kPausing) thread.state = State::kReady;
  }
}

bool Device::run_block() {
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

bool Device::run_threads(int first, int count) {
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

bool Device::release_warps(int begin, int count) {
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

bool Device::release_block(int size) {
  const Thread* const begin = block_->threads.get();
  const auto done = [](const Thread& t) { return t.state == State::kDone; };
  const auto pauses = [](const Thread& t) { return t.state == State::kPausing; };
  if (std::all_of(begin, begin + size, done)) return false;
  if (std::any_of(begin, begin + size, pauses)) return false;
  release(0, size, State::kAtBarrier);
  if constexpr (races::kOn) races::block_synchronized(blockIdx.x);
  return true;
}

void Device::release(int first, int count, State state) {
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

std::span<Block> Device::blocks_of(int64_t grid) {
  if (blocks_.size() < static_cast<size_t>(grid)) blocks_.resize(grid);
  const std::span<Block> blocks(blocks_.data(), grid);
  for (Block& block : blocks) {
    block.meetings = 0;
    block.done = false;
  }
  return blocks;
}

void Device::add_threads(int count) {
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

void Device::run_thread() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_stack_size_);
  while (true) {
    kernel_();
    wait(State::kDone, Site::current());
  }
}

}  // namespace host_cuda

unsigned __ballot_sync(unsigned mask, int predicate, host_cuda::Site site) {
  const auto votes = host_cuda::Device::current().exchanged(mask, predicate != 0, site);
  unsigned ballot = 0;
  for (int lane = 0; lane < host_cuda::kWarpSize; ++lane) ballot |= unsigned{votes[lane]} << lane;
  return ballot;
}
