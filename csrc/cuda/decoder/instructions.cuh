// Instructions that C++ has no name for: tensor cores, asynchronous copies, memory of other blocks.
// Without a GPU the test shim emulates them: host_cuda/instructions.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace accumext::cuda {

// Eight consecutive elements of two bytes: what a lane moves at once.
struct alignas(16) Octet {
  uint32_t words[4];
};

constexpr int kOctet = 8;  // elements

// The dynamic shared memory of the block.
__device__ inline std::byte* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) std::byte memory[];
  return memory;
#else
  return host_cuda::Device::current().dynamic_shared();
#endif
}

// sums [16, 8] += a [16, 16] b [16, 8], operands T, sums in float; of lane 4 g + t
//
//   a     rows g and g + 8, columns 2 t and 2 t + 1; then the same rows, columns 8 later
//   b     column g, rows 2 t and 2 t + 1; then rows 8 later
//   sums  row g, columns 2 t and 2 t + 1; then row g + 8
template <typename T>
__device__ void mma_16x8x16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef __CUDACC__
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  host_cuda::mma_16x8x16<T>(sums, a, b);
#endif
}

// --- asynchronous copies -------------------------------------------------------------------------

// The policy by which the fraction `kept` of all reads is evicted last from the L2 cache, the
// others first.
__device__ inline uint64_t cache_policy([[maybe_unused]] float kept) {
  uint64_t policy = 0;
#ifdef __CUDACC__
  asm volatile("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %0, %1;"
               : "=l"(policy)
               : "f"(kept));
#endif
  return policy;
}

// Begins to copy `bytes` of 16 bytes to shared memory, both sides aligned to 16; others become 0.
__device__ inline void copy_async(Octet* to, const void* from, int bytes,
                                  [[maybe_unused]] uint64_t policy) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes),
                 "l"(policy)
               : "memory");
#else
  host_cuda::copy_async(to, from, bytes);
#endif
}

// The same for all 16 bytes.
__device__ inline void copy_async(Octet* to, const void* from, [[maybe_unused]] uint64_t policy) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from), "l"(policy)
               : "memory");
#else
  host_cuda::copy_async(to, from, sizeof(Octet));
#endif
}

// Makes a group of the copies that the thread has begun since the last call.
__device__ inline void end_group() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  host_cuda::end_group();
#endif
}

// Waits for all groups of the thread but the last kLater.
template <int kLater>
__device__ void wait_for_group() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#else
  host_cuda::wait_for_group(kLater);
#endif
}

// --- memory that other blocks write --------------------------------------------------------------

// Reads past the caches of the multiprocessor, which do not see the writes of other blocks.
template <typename T>
__device__ T load_shared_between_blocks(const T* from) {
#ifdef __CUDACC__
  if constexpr (sizeof(T) == 16) {
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
    return T{{words.x, words.y, words.z, words.w}};
  } else {
    return __ldcg(from);
  }
#else
  return *from;
#endif
}

// Counts up by one, after all writes of the thread, and of threads with which it has synchronised.
__device__ inline void count_up_release(unsigned long long* count) {
#ifdef __CUDACC__
  asm volatile("red.release.gpu.global.add.u64 [%0], 1;" : : "l"(count) : "memory");
#else
  __threadfence();
  atomicAdd(count, 1ULL);
#endif
}

// Tells whether a counter has reached `least`; then all writes before the counting are visible.
__device__ inline bool has_reached(const unsigned long long* counter, unsigned long long least) {
#ifdef __CUDACC__
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value >= least;
#else
  return host_cuda::has_reached(counter, least);
#endif
}

}  // namespace accumext::cuda
