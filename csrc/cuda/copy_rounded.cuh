// The kernel that copies a list of tensors into tensors of other dtypes: one launch per call of
// copy_rounded_.
#pragma once

#include "cuda/device.cuh"
#include "math/copy_rounded.h"
#include "math/philox.h"

namespace accumext::cuda {

template <typename scalar_t>
constexpr Format kFormat = std::is_same_v<scalar_t, __half>          ? kHalfFormat
                           : std::is_same_v<scalar_t, __nv_bfloat16> ? kBFloat16Format
                           : std::is_same_v<scalar_t, float>         ? kFloatFormat
                                                                     : kDoubleFormat;

template <typename To, typename From>
__device__ To bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &x, sizeof(To));
  return result;
}

// The source of the random bits of one tensor.
struct Randomness {
  uint64_t seed;
  uint64_t tensor;
};

// Rounds elements [first, first + kCount) of a tensor; without a second neighbour, to nearest.
template <typename target_t, typename source_t, int kCount>
__device__ Vector<target_t, kCount> stochastically_rounded(const Vector<source_t, kCount>& x,
                                                           const Randomness& random,
                                                           int64_t first) {
  using From = Narrowing<kFormat<source_t>, kFormat<target_t>>;
  using U = std::conditional_t<sizeof(source_t) == 8, uint64_t, uint32_t>;
  using T = std::conditional_t<sizeof(target_t) == 4, uint32_t, uint16_t>;
  constexpr int kSign = 8 * sizeof(source_t) - 1;
  constexpr U kLeast = From::kLeastNormal, kLargest = From::kLargest;
  const auto magnitude = [&](int n) { return bits<U>(x.get(n)) & ~(U{1} << kSign); };
  const auto with_sign = [&](int n, U neighbour) {
    const U sign = bits<U>(x.get(n)) >> kSign << (8 * sizeof(target_t) - 1);
    return bits<target_t>(static_cast<T>(sign | neighbour));
  };
  Vector<target_t, kCount> result;
  uint32_t high[kCount], low[kCount] = {};
  random_halves(random.seed, random.tensor, 0, first, high);
  // The usual case, in vectors. Single elements are few; code for them would need more registers.
  if constexpr (From::kFew && kCount > 1) {
    bool normal = true;
    for (int n = 0; n < kCount; ++n) {
      normal = normal && magnitude(n) - kLeast <= kLargest - kLeast;
    }
    if (normal) {
      for (int n = 0; n < kCount; ++n) {
        result.set(n, with_sign(n, From::of_normal(magnitude(n), U{high[n]})));
      }
      return result;
    }
  }
  bool few = From::kFew;  // whether the high halves suffice
  for (int n = 0; n < kCount; ++n) few = few && magnitude(n) - kLeast <= kLargest;
  if (!few) random_halves(random.seed, random.tensor, 1, first, low);
  for (int n = 0; n < kCount; ++n) {
    const U neighbour = From::of_any(magnitude(n), U{high[n] << kHalfBits | low[n]});
    const target_t nearest = rounded<target_t>(x.get(n));
    result.set(n, magnitude(n) > kLargest ? nearest : with_sign(n, neighbour));
  }
  return result;
}

// Blocks of a multiprocessor if random bits are computed: 128 registers per thread.
constexpr int kStochasticBlocks = 2;

// target = round(source); if the dtypes are the same, a copy of the bits.
//
//   grid    any                          block   kBlockSize threads, over a chunk at a time
//   reads   source, any dtype, [chunk], once; seed; found_inf, or null
//   writes  target, any dtype, [chunk], once; nothing at all if found_inf is not 0
//   So 6 bytes per element of a float source and a half target. A target may be its source, hence
//   no __restrict__ on them. With three operands (tensor_list.h), rounding is stochastic if the
//   target is narrower than the source; with two there is no seed. There is no kernel for large
//   tables: the code is long, and weights and their masters stay where they are, so that a table
//   which is uploaded once serves every call.
template <int kOperands>
__global__ void __launch_bounds__(kBlockSize, kOperands == 3 ? kStochasticBlocks : kResidentBlocks)
    copy_rounded_kernel(const __grid_constant__ SmallTable<kOperands> table,
                        const int64_t* __restrict__ seed, const float* __restrict__ found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const int64_t begin = share(table, blockIdx.x);
  const int64_t end = share(table, blockIdx.x + int64_t{1});
  for_each_chunk(table, begin, end, [&](const Entry<kOperands>& entry, int64_t chunk) {
    with_type(entry.dtype[0], [&](auto target_type) {
      with_type(entry.dtype[1], [&](auto source_type) {
        using target_t = decltype(target_type);
        using source_t = decltype(source_type);
        // One block of random bits is enough for a vector of halves, which is two of floats.
        constexpr bool kBlocks =
            kOperands == 3 && sizeof(target_t) == 2 && std::is_same_v<source_t, float>;
        using widest_t = std::conditional_t<kBlocks, target_t, source_t>;
        constexpr int kUnroll = kBlocks ? 2 : kInFlight<target_t, source_t>;
        target_t* target = data_of<target_t>(entry, 0);
        const source_t* source = data_of<const source_t>(entry, 1);
        walk<kUnroll, target_t, widest_t>(
            table, entry, chunk,
            [&]<int kCount, bool kAligned>(Access<kCount, kAligned>, const auto& at) {
              return read<kCount, kAligned>(source + at.of[1]);
            },
            [&]<int kCount>(const Vector<source_t, kCount>& x, const auto& at) {
              if constexpr (std::is_same_v<target_t, source_t>) {
                write(target + at.of[0], x);
              } else if constexpr (kOperands == 3 && sizeof(target_t) < sizeof(source_t)) {
                const Randomness random{static_cast<uint64_t>(*seed),
                                        reinterpret_cast<uintptr_t>(entry.data[2])};
                write(target + at.of[0], stochastically_rounded<target_t>(x, random, at.of[2]));
              } else {
                using acc_t = std::conditional_t<sizeof(source_t) == 8, double, float>;
                Vector<target_t, kCount> result;
                for (int n = 0; n < kCount; ++n) {
                  result.set(n, rounded<target_t>(load<acc_t>(x.get(n))));
                }
                write(target + at.of[0], result);
              }
            });
      });
    });
  });
}

}  // namespace accumext::cuda
