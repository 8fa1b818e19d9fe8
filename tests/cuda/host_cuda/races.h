// A race detector for kernels on the host. With HOST_CUDA_RACES the compiler reports every access
// to memory (-fsanitize=thread) to races.cpp, which is the runtime in place of ThreadSanitizer's;
// simt.h and runtime.cpp report here what is shared, who runs, and who waits for whom.
//
// Two accesses of a byte are a race if one of them writes and neither happens before the other. As
// in the memory model of PTX, what happens before what follows from
//   - a thread's own program;
//   - __syncthreads(): all that a block did before it, all that it does after it;
//   - __threadfence(), then atomicAdd() on a counter, and has_reached() of that counter elsewhere;
//     of the fence counts what its block did up to the last __syncthreads();
//   - launches of one stream, one after the other.
// Nothing else orders accesses: not shuffles, votes and products of a warp, not atomics, not the
// order in which the host runs threads. Atomics do not race with atomics. An asynchronous copy
// reads and writes at any time from its issue to the wait for its group, for its own thread, too.
// One run of a kernel therefore speaks for every order of its threads, as far as they take the same
// branches there. A write that happens before is taken to be visible: caches are not looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace host_cuda::races {

#ifdef HOST_CUDA_RACES
constexpr bool kOn = true;
#else
constexpr bool kOn = false;  // nothing below is called
#endif

enum class Space { kDevice, kDynamicShared, kStaticShared };

// Memory that threads share: until forget(), shared memory until the next launch. Static shared
// memory has one address in all blocks. Other memory is taken to be a thread's own.
void watch(Space space, const void* begin, size_t bytes);
void forget(const void* begin);

void begin_launch(int64_t blocks);
std::string finish();  // races since it was asked last, a line each, and launches without access

// Sets the thread that runs; after pause() none does, and no access is a kernel's.
void resume(unsigned block, unsigned thread);
void pause();

void block_synchronized(unsigned block);            // by __syncthreads()
void fence();                                       // the running thread, as in all that follows
void counted(const void* counter, uint64_t count);  // by the running thread, up to so many
void reached(const void* counter, uint64_t least);  // and it has seen that
void set_atomic(bool atomic);                       // whether accesses are, from now on

// `place`: an address in the program.
void begin_copy(const void* to, size_t written, const void* from, size_t read, const void* place);
void end_copy(const void* to, size_t written, const void* from, size_t read, const void* place);

template <typename F>
auto atomically(const F& f) {
  if constexpr (kOn) set_atomic(true);
  const auto result = f();
  if constexpr (kOn) set_atomic(false);
  return result;
}

}  // namespace host_cuda::races
