// See races.h. This file itself is compiled without instrumentation.
#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace host_cuda::races {
namespace {

// Of each block how many of its epochs, which end at its __syncthreads(), have happened before.
struct Clock {
  std::vector<uint32_t> epochs;

  void join(const Clock& other) {
    epochs.resize(std::max(epochs.size(), other.epochs.size()));
    for (size_t b = 0; b < other.epochs.size(); ++b) {
      epochs[b] = std::max(epochs[b], other.epochs[b]);
    }
  }

  bool has(uint32_t block, uint32_t epoch) const {
    return block < epochs.size() && epoch < epochs[block];
  }
};

struct Block {
  uint32_t epoch = 0;
  Clock clock;                    // of all its threads
  std::map<int, Clock> acquired;  // by single threads since the last __syncthreads()
  std::map<int, Clock> fenced;    // at the last fence of a thread
};

struct Access {
  const void* at;  // in the program
  uint32_t epoch;
  uint16_t block, thread;
  bool write, atomic;
  bool copies;  // asynchronously, and is not done

  bool alike(const Access& other) const {
    return block == other.block && write == other.write && atomic == other.atomic && !copies &&
           !other.copies;
  }
};

// Of each block and kind of access the last ones of two threads since the last write that is not
// atomic: whoever races with a third one races with one of them.
using History = std::vector<Access>;

// Of runs of bytes that have the same history, by their first one; at the end of the region none.
using Shadow = std::map<size_t, History>;

struct Region {
  Space space;
  size_t size;
  std::map<int, Shadow> shadows;  // by block where it is static shared memory
};

struct Release {
  uint64_t count;
  Clock clock;
};

// Never destroyed, as memory that is watched may outlive it.
auto& regions = *new std::map<uintptr_t, Region>;
auto& blocks = *new std::vector<Block>;
auto& releases = *new std::map<const void*, std::vector<Release>>;
constexpr size_t kMostFound = 8;
auto& racing = *new std::set<std::pair<const void*, const void*>>;  // places in the program
auto& found = *new std::set<std::pair<std::string, std::string>>;   // and in the source
auto& said = *new std::string;                                      // of these

bool running = false;
bool atomic = false;
unsigned block = 0, thread = 0;
int64_t launches = 0;
int64_t accesses = 0, accesses_before = 0;  // in all, and before the last launch

// The innermost lines of the kernels at a return address.
std::string place(const void* at) {
  static auto& known = *new std::map<const void*, std::string>;
  const auto [entry, is_new] = known.try_emplace(at);
  std::string& text = entry->second;
  if (!is_new) return text;
  Dl_info library{};
  dladdr(at, &library);
  const auto begin = reinterpret_cast<uintptr_t>(library.dli_fbase);
  const auto address = reinterpret_cast<uintptr_t>(at) - begin - 1;  // in the call
  char command[5000];
  std::snprintf(command, sizeof(command), "addr2line -i -e '%s' %#zx", library.dli_fname, address);
  FILE* const lines = popen(command, "r");
  char line[4096];
  for (int left = 3; lines != nullptr && std::fgets(line, sizeof(line), lines) != nullptr;) {
    const char* const slash = std::strrchr(line, '/');
    if (slash == nullptr || std::strstr(slash, ".cuh:") == nullptr || left-- <= 0) continue;
    const std::string base(slash + 1, std::strcspn(slash + 1, " \n"));
    text += text.empty() ? base : " < " + base;
  }
  if (lines != nullptr) pclose(lines);
  return text;
}

std::string description(const Access& access) {
  const char* const kind = access.copies ? "copy" : access.atomic ? "atomic" : "plain";
  char text[100];
  std::snprintf(text, sizeof(text), "%s %s by block %d thread %d at ", kind,
                access.write ? "write" : "read", access.block, access.thread);
  return text + place(access.at);
}

void report(const Region& region, size_t byte, const Access& first, const Access& second) {
  if (found.size() == kMostFound || !racing.insert({first.at, second.at}).second) return;
  if (!found.insert({place(first.at), place(second.at)}).second) return;
  constexpr const char* kNames[] = {"device", "dynamic shared", "static shared"};
  const std::string text = std::string("race in ") + kNames[static_cast<int>(region.space)] +
                           " memory, byte " + std::to_string(byte) + ", launch " +
                           std::to_string(launches) + ": " + description(first) + "; " +
                           description(second) + "\n";
  said += text;
  std::fputs(text.c_str(), stderr);  // at once: the process may end before it is asked
}

// Tells whether an access happened before one that the running thread makes now.
bool happened_before(const Access& access) {
  if (access.copies) return false;
  const Block& mine = blocks[block];
  if (access.block == block) return access.thread == thread || access.epoch < mine.epoch;
  if (mine.clock.has(access.block, access.epoch)) return true;
  const auto acquired = mine.acquired.find(thread);
  return acquired != mine.acquired.end() && acquired->second.has(access.block, access.epoch);
}

void remember(History& history, const Access& access) {
  if (access.write && !access.atomic) history.clear();
  Access* oldest = nullptr;
  int alike = 0;
  for (Access& other : history) {
    if (!other.alike(access)) continue;
    if (other.thread == access.thread) {
      other = access;
      return;
    }
    ++alike;
    if (oldest == nullptr || other.epoch < oldest->epoch) oldest = &other;
  }
  if (alike < 2) {
    history.push_back(access);
  } else {
    *oldest = access;
  }
}

// The run that begins at a byte.
Shadow::iterator run_at(Shadow& shadow, size_t byte) {
  const auto run = std::prev(shadow.upper_bound(byte));
  return run->first == byte ? run : shadow.emplace_hint(std::next(run), byte, run->second);
}

// f(history, region, first byte) for the bytes that are watched, in the running thread's shadow.
template <typename F>
void for_each_run(const void* memory, size_t size, const F& f) {
  if (!running || size == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto next = regions.upper_bound(address);
  if (next == regions.begin()) return;
  auto& [address_of_region, region] = *--next;
  const size_t begin = address - address_of_region;
  if (begin >= region.size) return;
  const int owner = region.space == Space::kStaticShared ? static_cast<int>(block) : -1;
  Shadow& shadow = region.shadows[owner];
  if (shadow.empty()) shadow = {{0, {}}, {region.size, {}}};
  const auto end = run_at(shadow, std::min(begin + size, region.size));
  for (auto run = run_at(shadow, begin); run != end; ++run) f(run->second, region, run->first);
}

void look_at(const void* memory, size_t size, bool write, bool copies, const void* at) {
  bool watched = false;
  for_each_run(memory, size, [&](History& history, const Region& region, size_t byte) {
    const auto its_block = static_cast<uint16_t>(block);
    const auto its_thread = static_cast<uint16_t>(thread);
    const Access mine{at, blocks[block].epoch, its_block, its_thread, write, atomic, copies};
    watched = true;
    for (const Access& other : history) {
      const bool conflicts = (write || other.write) && !(atomic && other.atomic);
      if (conflicts && !happened_before(other)) report(region, byte, other, mine);
    }
    remember(history, mine);
  });
  accesses += watched;
}

void end_access(const void* memory, size_t size, bool write) {
  for_each_run(memory, size, [&](History& history, const Region&, size_t) {
    const auto ours = std::ranges::find_if(history, [&](const Access& access) {
      return access.copies && access.write == write && access.block == block &&
             access.thread == thread;
    });
    if (ours != history.end()) history.erase(ours);
  });
}

void end_launch() {
  if (launches > 0 && accesses == accesses_before) {
    said += "no access of launch " + std::to_string(launches) + " was checked\n";
  }
  accesses_before = accesses;
}

}  // namespace

void watch(Space space, const void* begin, size_t bytes) {
  Region& region = regions[reinterpret_cast<uintptr_t>(begin)];
  region.space = space;
  region.size = bytes;
}

void forget(const void* begin) { regions.erase(reinterpret_cast<uintptr_t>(begin)); }

void begin_launch(int64_t count) {
  end_launch();
  ++launches;
  std::erase_if(regions, [](const auto& r) { return r.second.space != Space::kDevice; });
  for (auto& [begin, region] : regions) region.shadows.clear();
  blocks.assign(count, {});
  releases.clear();
}

std::string finish() {
  end_launch();
  launches = 0;
  racing.clear();
  found.clear();
  return std::exchange(said, {});
}

void resume(unsigned its_block, unsigned its_thread) {
  running = true;
  block = its_block;
  thread = its_thread;
}

void pause() { running = false; }

void block_synchronized(unsigned its_block) {
  Block& mine = blocks[its_block];
  ++mine.epoch;
  for (const auto& [by, clock] : mine.acquired) mine.clock.join(clock);
  mine.acquired.clear();
}

void fence() {
  Block& mine = blocks[block];
  Clock clock = mine.clock;
  if (mine.acquired.contains(thread)) clock.join(mine.acquired[thread]);
  clock.epochs.resize(blocks.size());
  clock.epochs[block] = mine.epoch;
  mine.fenced[thread] = std::move(clock);
}

void counted(const void* counter, uint64_t count) {
  const auto fenced = blocks[block].fenced.find(thread);
  if (fenced == blocks[block].fenced.end()) return;
  std::vector<Release>& all = releases[counter];
  Release release{count, all.empty() ? Clock() : all.back().clock};
  release.clock.join(fenced->second);
  all.push_back(std::move(release));
}

void reached(const void* counter, uint64_t least) {
  // Who waits for a count may have seen that very one, not those which are there by now.
  for (const Release& release : releases[counter]) {
    blocks[block].acquired[thread].join(release.clock);
    if (release.count >= least) break;
  }
}

void set_atomic(bool on) { atomic = on; }

void begin_copy(const void* to, size_t written, const void* from, size_t read, const void* place) {
  look_at(from, read, /*write=*/false, /*copies=*/true, place);
  look_at(to, written, /*write=*/true, /*copies=*/true, place);
}

void end_copy(const void* to, size_t written, const void* from, size_t read, const void* place) {
  end_access(from, read, /*write=*/false);
  end_access(to, written, /*write=*/true);
  look_at(from, read, /*write=*/false, /*copies=*/false, place);
  look_at(to, written, /*write=*/true, /*copies=*/false, place);
}

}  // namespace host_cuda::races

// --- what the compiler calls ---------------------------------------------------------------------

using host_cuda::races::look_at;

extern "C" {

void __tsan_init() {}

#define HOST_CUDA_ACCESS(kind, size, write)                                     \
  void __tsan_##kind##size(void* begin) {                                       \
    look_at(begin, size, write, /*copies=*/false, __builtin_return_address(0)); \
  }
#define HOST_CUDA_ACCESSES(size)                \
  HOST_CUDA_ACCESS(read, size, false)           \
  HOST_CUDA_ACCESS(write, size, true)           \
  HOST_CUDA_ACCESS(unaligned_read, size, false) \
  HOST_CUDA_ACCESS(unaligned_write, size, true)

HOST_CUDA_ACCESSES(1)
HOST_CUDA_ACCESSES(2)
HOST_CUDA_ACCESSES(4)
HOST_CUDA_ACCESSES(8)
HOST_CUDA_ACCESSES(16)

void __tsan_read_range(void* begin, size_t size) {
  look_at(begin, size, /*write=*/false, /*copies=*/false, __builtin_return_address(0));
}

void __tsan_write_range(void* begin, size_t size) {
  look_at(begin, size, /*write=*/true, /*copies=*/false, __builtin_return_address(0));
}

// Of functions that the linker puts in their place: --wrap.
void* __real_memcpy(void* to, const void* from, size_t size);
void* __wrap_memcpy(void* to, const void* from, size_t size) {
  look_at(from, size, /*write=*/false, /*copies=*/false, __builtin_return_address(0));
  look_at(to, size, /*write=*/true, /*copies=*/false, __builtin_return_address(0));
  return __real_memcpy(to, from, size);
}

void* __real_memset(void* to, int value, size_t size);
void* __wrap_memset(void* to, int value, size_t size) {
  look_at(to, size, /*write=*/true, /*copies=*/false, __builtin_return_address(0));
  return __real_memset(to, value, size);
}

// Of shared pointers and classes on the host, which no kernel has.
int __tsan_atomic32_fetch_add(volatile int* at, int more, int) {
  return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_load(const volatile int* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
void __tsan_vptr_update(void**, void*) {}

// The sanitizers that these builds are without, as others here call them.
void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
void __asan_poison_memory_region(const volatile void*, size_t) {}
void __asan_unpoison_memory_region(const volatile void*, size_t) {}
void* __asan_region_is_poisoned(void*, size_t) { return nullptr; }

}  // extern "C"
