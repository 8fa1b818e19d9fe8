// The distribution of tensors over threads: a block takes a chunk of one tensor, its threads take
// vectors. No torch here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/operands.h"
#include "cuda/tensor_list.h"
#include "math/norm.h"

namespace accumext::cuda {

constexpr int kWarpSize = 32;
constexpr int kBlockSize = 256;     // threads
constexpr int kResidentBlocks = 4;  // of each multiprocessor: 64 registers per thread
constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline int lane() { return threadIdx.x % kWarpSize; }

// --- how a table travels -----------------------------------------------------------------------

// Bytes of a table that travels among the arguments of a kernel. The arguments may have 4,096 in
// all, and from CUDA 12.1 on 32,764, if the driver has it; the rest is left for the others. Most
// kernels are there for both sizes, since more bytes take longer to launch.
constexpr size_t kSmallTable = 3920;
constexpr size_t kLargeTable = CUDART_VERSION >= 12010 ? 32560 : kSmallTable;

template <int kOperands>
using SmallTable = Table<kOperands, kSmallTable>;
template <int kOperands>
using LargeTable = Table<kOperands, kLargeTable>;

// --- which chunk -------------------------------------------------------------------------------

// The tensor of a chunk. Each step looks at 32 tensors at once.
template <int kOperands, size_t kBytes>
__device__ int tensor_of(const Table<kOperands, kBytes>& table, int64_t chunk) {
  int first = 0;
  int end = table.tensors;
  while (end - first > 1) {
    const int step = (end - first + kWarpSize - 1) / kWarpSize;
    const int mine = first + lane() * step;
    const bool started = mine < end && table.entry(mine).first_chunk <= chunk;
    first += (__popc(__ballot_sync(kAllLanes, started)) - 1) * step;
    end = first + step < end ? first + step : end;
  }
  return first;
}

// Calls f(entry, chunk) for chunks [begin, end), in all threads of a block. Every tensor has a
// chunk, so only the tensor of the first chunk has to be searched for.
template <int kOperands, size_t kBytes, typename F>
__device__ void for_each_chunk(const Table<kOperands, kBytes>& table, int64_t begin, int64_t end,
                               const F& f) {
  if (begin >= end) return;
  int tensor = tensor_of(table, begin);
#pragma unroll 1
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    if (!table.entry(tensor).holds(chunk)) ++tensor;
    f(table.entry(tensor), chunk);
  }
}

// The begin of a block's share of all chunks. Shares are contiguous and differ by one at most.
template <int kOperands, size_t kBytes>
__device__ int64_t share(const Table<kOperands, kBytes>& table, int64_t block) {
  return table.chunks * block / gridDim.x;
}

// --- which elements ----------------------------------------------------------------------------

// The same element in each operand, in elements from its data.
template <int kOperands>
struct Offsets {
  int64_t of[kOperands];
};

template <int kOperands>
__device__ Offsets<kOperands> same_offsets(int64_t offset) {
  Offsets<kOperands> result;
  for (int k = 0; k < kOperands; ++k) result.of[k] = offset;
  return result;
}

template <int kOperands, size_t kBytes>
__device__ Offsets<kOperands> offsets_of(const Table<kOperands, kBytes>& table,
                                         const Entry<kOperands>& entry, int64_t element) {
  if (entry.dims == 0) return same_offsets<kOperands>(element);
  Offsets<kOperands> result = same_offsets<kOperands>(0);
#pragma unroll 1
  for (int d = entry.dims - 1; d >= 0; --d) {
    const Dim<kOperands>& dim = table.dim(entry.first_dim + d);
    const int64_t outer = d == 0 ? 0 : element / dim.size;  // a 64-bit division is slow
    const int64_t inner = element - outer * dim.size;
    for (int k = 0; k < kOperands; ++k) result.of[k] += inner * dim.stride[k];
    element = outer;
  }
  return result;
}

// How a thread reads consecutive elements: of operand 0 always as a vector, of another one only if
// that is aligned, else one by one.
template <int kElements, bool kAligned>
struct Access {};

// Calls use(load(Access, at), at) for kCount elements at a time; each thread has kUnroll in flight.
template <int kCount, bool kAligned, int kUnroll, typename At, typename Load, typename Use>
__device__ void sweep(int times, const At& at, const Load& load, const Use& use) {
#pragma unroll 1
  for (int first = threadIdx.x; first < times; first += kUnroll * kBlockSize) {
    decltype(at(0)) offsets[kUnroll];
    // Set even if nothing is loaded: an older value would keep its registers, too.
    decltype(load(Access<kCount, kAligned>(), at(0))) loaded[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int time = first + u * kBlockSize;
      offsets[u] = at(time);
      // Beyond the end, the thread's first vector is loaded again. With a branch around each load
      // the compiler would wait for one before it issues the next; and the vector must be the
      // thread's own, since other threads may have stored theirs.
      loaded[u] = load(Access<kCount, kAligned>(), at(time < times ? time : first));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kBlockSize < times) use(loaded[u], offsets[u]);
    }
  }
}

// Elements of one vector: kVectorBytes of the largest type. With more of them, a thread would need
// two accesses to that operand, each of which uses only half of every 32-byte sector.
template <typename... scalar_t>
constexpr int kWidth = kVectorBytes / std::max({sizeof(scalar_t)...});

// Vectors in flight in each thread: at least 64 bytes, so that kResidentBlocks cover the latency of
// the memory. An H200 (4.8 TB/s, 132 multiprocessors, about 0.8 us) needs 29 kB, and gets 64. It is
// rounded up to a power of two, which divides a chunk; but not for doubles, since a thread would
// need more registers than it has, and a load would have to wait for another.
template <typename... scalar_t>
constexpr unsigned kLeastInFlight = (64 - 1) / (kWidth<scalar_t...> * (sizeof(scalar_t) + ...)) + 1;

template <typename... scalar_t>
constexpr int kInFlight =
    std::max({sizeof(scalar_t)...}) == sizeof(double) ? kLeastInFlight<scalar_t...>
                                                      : std::bit_ceil(kLeastInFlight<scalar_t...>);

// Processes a chunk with the threads of a block: load(Access, offsets) reads so many consecutive
// elements, use(loaded, offsets) computes and writes. A dense tensor moves in vectors, with operand
// 1 element by element if that is not aligned; its head and tail, and any other tensor, one element
// per thread. With three operands a tensor of which one is not aligned does so, too: code for it
// would need more registers than a thread has beside random bits.
template <int kUnroll, typename... scalar_t, int kOperands, size_t kBytes, typename Load,
          typename Use>
__device__ void walk(const Table<kOperands, kBytes>& table, const Entry<kOperands>& entry,
                     int64_t chunk, const Load& load, const Use& use) {
  constexpr int width = kWidth<scalar_t...>;
  constexpr bool kMixed = kOperands == 2;  // vectors of one operand beside elements of another
  constexpr int kSingles = kOperands == 3 ? 4 : 1;  // in flight
  bool aligned = true;
  if constexpr (kOperands > 1) aligned = entry.aligned[1];
  const int64_t begin = entry.chunk_begin(chunk);
  const int size = static_cast<int>(entry.chunk_end(chunk) - begin);
  const int head = chunk == entry.first_chunk ? entry.head : 0;
  const int vectors = entry.dims == 0 && (aligned || kMixed) ? (size - head) / width : 0;
  const int vectored = vectors * width;
  const auto vector = [&](int i) { return same_offsets<kOperands>(begin + head + i * width); };
  const auto single = [&](int i) {
    return offsets_of(table, entry, begin + (i < head ? i : i + vectored));
  };
  if (aligned) {
    sweep<width, true, kUnroll>(vectors, vector, load, use);
  } else if constexpr (kMixed) {
    sweep<width, false, (kUnroll + 1) / 2>(vectors, vector, load, use);
  }
  sweep<1, true, kSingles>(size - vectored, single, load, use);
}

// --- elements ----------------------------------------------------------------------------------

// Consecutive elements, moved in accesses of up to kVectorBytes. They stay packed until they are
// used, because two separate halves would take two registers.
template <typename scalar_t, int kCount>
class alignas(std::min<int64_t>(kCount * sizeof(scalar_t), kVectorBytes)) Vector {
 public:
  __device__ scalar_t get(int n) const {
    scalar_t x;
    std::memcpy(&x, reinterpret_cast<const char*>(words_) + n * sizeof(x), sizeof(x));
    return x;
  }

  __device__ void set(int n, scalar_t x) {
    std::memcpy(reinterpret_cast<char*>(words_) + n * sizeof(x), &x, sizeof(x));
  }

 private:
  static constexpr size_t kBytes = kCount * sizeof(scalar_t);
  using word_t = std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>;

  word_t words_[kBytes / sizeof(word_t)];
};

// The data of an operand. The address space is stated, as the compiler cannot infer it for a
// pointer that is loaded from memory.
template <typename scalar_t, int kOperands>
__device__ scalar_t* data_of(const Entry<kOperands>& entry, int operand) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(entry.data[operand]));
#endif
  return static_cast<scalar_t*>(entry.data[operand]);
}

template <int kCount, bool kAligned = true, typename scalar_t>
__device__ Vector<scalar_t, kCount> read(const scalar_t* data) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const Vector<scalar_t, kCount>*>(data);
  } else {
    Vector<scalar_t, kCount> vector;
    for (int n = 0; n < kCount; ++n) vector.set(n, data[n]);
    return vector;
  }
}

template <int kCount, typename scalar_t>
__device__ void write(scalar_t* data, const Vector<scalar_t, kCount>& vector) {
  *reinterpret_cast<Vector<scalar_t, kCount>*>(data) = vector;
}

// Call f with a value of the C++ type of dtype.
template <typename F>
__device__ auto with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kHalf:
      return f(__half());
    case Dtype::kBFloat16:
      return f(__nv_bfloat16());
    case Dtype::kFloat:
      return f(float());
    default:
      return f(double());
  }
}

template <typename acc_t, typename scalar_t>
__device__ acc_t load(scalar_t x) {
  if constexpr (std::is_same_v<scalar_t, double>) {
    return static_cast<acc_t>(x);
  } else {
    return static_cast<acc_t>(static_cast<float>(x));
  }
}

// PyTorch rounds double to half by way of float, and so does this.
template <typename scalar_t, typename acc_t>
__device__ scalar_t rounded(acc_t x) {
  if constexpr (std::is_same_v<scalar_t, double>) {
    return x;
  } else if constexpr (std::is_same_v<scalar_t, __half>) {
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<float>(x);
  }
}

__device__ inline double value(const Scalar& scalar) {
  if (scalar.data == nullptr) return scalar.value;
  return with_type(scalar.dtype, [&](auto type) {
    return load<double>(*static_cast<const decltype(type)*>(scalar.data));
  });
}

}  // namespace accumext::cuda
