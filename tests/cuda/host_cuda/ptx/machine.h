// The instructions of PTX, for the code that translate.py makes: `add.rn.f32 %f1, %f2, %f3` is
// `_f1 = add_rn<f32>(_f2, _f3)`. Registers are unsigned integers that hold the bits of a value of a
// type. Approximate functions are exact here. Barriers, warps and copies are those of simt.h.
#pragma once

#include "instructions.h"
//
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

namespace {

using host_cuda::Device;
using host_cuda::fail;
using host_cuda::Site;

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using b8 = u8;
using b16 = u16;
using b32 = u32;
using b64 = u64;
using pred = bool;
using f16 = __half;
using bf16 = __nv_bfloat16;
using f32 = float;
using f64 = double;

// The unsigned integer of so many bytes.
template <size_t kBytes>
using Unsigned = std::tuple_element_t<std::countr_zero(kBytes), std::tuple<u8, u16, u32, u64>>;

// The type of a register of T. A class, since compilers look up a class template once for each T.
template <typename T>
struct RegisterOf {
  using type = std::conditional_t<std::same_as<T, pred>, pred, Unsigned<sizeof(T)>>;
};
template <typename T>
using Bits = RegisterOf<T>::type;

template <typename T>
T value(Bits<T> bits) {
  return std::bit_cast<T>(bits);
}

template <typename T>
Bits<T> bits(T value) {
  return std::bit_cast<Bits<T>>(value);
}

// A value for a register that may be wider than T: small integers are extended by their sign.
template <typename T>
using Extended = std::conditional_t<std::integral<T>, T, Bits<T>>;

template <typename T>
Extended<T> extended(T value) {
  return std::bit_cast<Extended<T>>(value);
}

template <typename T>
constexpr bool kFloat = std::floating_point<T>;

template <typename T>
constexpr u32 kWidth = 8 * sizeof(T);

// --- kernels -------------------------------------------------------------------------------------

struct Kernel {
  Kernel(const char* name, host_cuda::Translated* kernel) {
    host_cuda::translated()[name] = kernel;
  }
};

// --- memory --------------------------------------------------------------------------------------

// Addresses of shared memory are 32 bits: of static memory, how far it is from the first of the
// program; of dynamic memory, from here on.
constexpr u64 kDynamic = 1 << 24;

inline char* static_shared() {
  static char* const begin = reinterpret_cast<char*>(host_cuda::shared_memory().data());
  return begin;
}

// Of each byte of static shared memory, where the variable ends of which it is; 0 if it is of none.
inline u32* ends_in_shared() {
  static u32* const ends = new u32[host_cuda::shared_memory().size()]();
  return ends;
}

// A variable in static shared memory; what is read or written there has to be inside of one.
struct Shared {
  template <size_t kSize>
  explicit Shared(char (&memory)[kSize]) : begin(memory - static_shared()) {
    std::fill_n(ends_in_shared() + begin, kSize, static_cast<u32>(begin + kSize));
  }
  operator u64() const { return begin; }

  u64 begin;
};

inline u64 address(u64 in_register) { return in_register; }

template <typename V>
u64 address(V* variable) {
  return reinterpret_cast<u64>(variable);
}

// A host address of so many bytes of shared memory.
inline u64 in_shared(u64 at, size_t size) {
  if (at >= kDynamic) return address(Device::current().dynamic_shared()) + (at - kDynamic);
  static const u64 all = host_cuda::shared_memory().size();
  if (at >= all || at + size > ends_in_shared()[at]) {
    fail("an access beside shared memory", Site::current());
  }
  return address(static_shared()) + at;
}

// What AddressSanitizer, which does not know this code, would see.
inline void check_access(u64 at, size_t size) {
  if (at % size != 0) fail("a misaligned access", Site::current());
  if (__asan_region_is_poisoned(reinterpret_cast<void*>(at), size) != nullptr) {
    fail("an access beside memory", Site::current());
  }
}

template <typename T, int kCount>
auto ld(u64 at) {
  check_access(at, kCount * sizeof(T));
  std::array<T, kCount> memory;
  std::memcpy(&memory, reinterpret_cast<const void*>(at), sizeof(memory));
  if constexpr (kCount == 1) {
    return extended(memory[0]);
  } else {
    std::array<Extended<T>, kCount> all;
    std::ranges::transform(memory, all.begin(), extended<T>);
    return all;
  }
}

template <typename T, int kCount>
auto ld_shared(u64 at) {
  return ld<T, kCount>(in_shared(at, kCount * sizeof(T)));
}

template <typename T, int kCount>
using Stored = std::conditional_t<kCount == 1, Bits<T>, std::array<Bits<T>, kCount>>;

template <typename T, int kCount>
void st(u64 at, Stored<T, kCount> all) {
  check_access(at, sizeof(all));
  std::memcpy(reinterpret_cast<void*>(at), &all, sizeof(all));
}

template <typename T, int kCount>
void st_shared(u64 at, Stored<T, kCount> all) {
  st<T, kCount>(in_shared(at, sizeof(all)), all);
}

// Generic addresses are those of the host, as are all but those of shared memory.
#define SAME_ADDRESS(name) \
  template <typename T>    \
  u64 name(u64 at) {       \
    return at;             \
  }
SAME_ADDRESS(cvta_local)
SAME_ADDRESS(cvta_param)
SAME_ADDRESS(cvta_to_global)
SAME_ADDRESS(cvta_to_local)
#undef SAME_ADDRESS

// --- registers -----------------------------------------------------------------------------------

template <typename T>
Bits<T> mov(Bits<T> x) {
  return x;
}

template <typename T, typename V>
u64 mov(V* variable) {
  return address(variable);
}

template <typename T, int kCount>
using Parts = std::array<Unsigned<sizeof(T) / kCount>, kCount>;

template <typename T, int kCount>
T pack(Parts<T, kCount> parts) {
  return std::bit_cast<T>(parts);
}

template <typename T, int kCount>
Parts<T, kCount> unpack(T whole) {
  return std::bit_cast<Parts<T, kCount>>(whole);
}

template <typename T>
Bits<T> selp(Bits<T> a, Bits<T> b, bool first) {
  return first ? a : b;
}

// --- comparisons ---------------------------------------------------------------------------------

// Ordered: false if one of them is NaN; unordered: true.
#define COMPARE(name, ordered)                           \
  template <typename T>                                  \
  bool setp_##name(Bits<T> x, Bits<T> y) {               \
    const T a = value<T>(x), b = value<T>(y);            \
    return ordered;                                      \
  }                                                      \
  template <typename T>                                  \
  bool setp_##name##_and(Bits<T> x, Bits<T> y, bool p) { \
    return setp_##name<T>(x, y) && p;                    \
  }                                                      \
  template <typename T>                                  \
  bool setp_##name##_or(Bits<T> x, Bits<T> y, bool p) {  \
    return setp_##name<T>(x, y) || p;                    \
  }
COMPARE(eq, a == b)
COMPARE(ne, a<b || a> b)
COMPARE(lt, a < b)
COMPARE(le, a <= b)
COMPARE(gt, a > b)
COMPARE(ge, a >= b)
COMPARE(neu, a != b)
COMPARE(ltu, !(a >= b))
COMPARE(leu, !(a > b))
COMPARE(gtu, !(a <= b))
COMPARE(geu, !(a < b))
COMPARE(num, !std::isunordered(a, b))
COMPARE(nan, std::isunordered(a, b))
#undef COMPARE

// --- integers ------------------------------------------------------------------------------------

// The same for signed and unsigned numbers.
#define WRAPPING(name, result)           \
  template <typename T>                  \
  Bits<T> name(Bits<T> x, Bits<T> y) {   \
    const u64 a = x, b = y;              \
    return static_cast<Bits<T>>(result); \
  }
WRAPPING(add, a + b)
WRAPPING(sub, a - b)
WRAPPING(mul_lo, a* b)
WRAPPING(and_, a& b)
WRAPPING(or_, a | b)
WRAPPING(xor_, a ^ b)
#undef WRAPPING

template <typename T>
Bits<T> not_(Bits<T> x) {
  return std::same_as<T, pred> ? !x : ~x;
}

template <typename T>
Bits<T> neg(Bits<T> x) {
  if constexpr (kFloat<T>) {
    return bits(-value<T>(x));
  } else {
    return sub<T>(0, x);
  }
}

template <typename T>
Bits<T> mad_lo(Bits<T> a, Bits<T> b, Bits<T> c) {
  return add<T>(mul_lo<T>(a, b), c);
}

template <typename T>
u64 mul_wide(Bits<T> a, Bits<T> b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, s64, u64>;
  return bits(Wide{value<T>(a)} * Wide{value<T>(b)});
}

template <typename T>
Bits<T> div(Bits<T> a, Bits<T> b) {
  return bits(static_cast<T>(value<T>(a) / value<T>(b)));
}

template <typename T>
Bits<T> rem(Bits<T> a, Bits<T> b) {
  return bits(static_cast<T>(value<T>(a) % value<T>(b)));
}

template <typename T>
Bits<T> shl(Bits<T> x, u32 count) {
  return count < kWidth<T> ? static_cast<Bits<T>>(u64{x} << count) : 0;
}

template <typename T>
Bits<T> shr(Bits<T> x, u32 count) {
  if (count >= kWidth<T>) return value<T>(x) < T{0} ? ~Bits<T>{0} : 0;
  return static_cast<Bits<T>>(value<T>(x) >> count);
}

template <typename T>
T bfi(T from, T to, u32 begin, u32 count) {
  const T mask = shl<T>(count < kWidth<T> ? shl<T>(1, count) - 1 : ~T{0}, begin);
  return (to & ~mask) | (shl<T>(from, begin) & mask);
}

template <typename T>
u32 popc(T x) {
  return std::popcount(x);
}

// --- floating point ------------------------------------------------------------------------------

#define UNARY(name, result)              \
  template <typename T>                  \
  Bits<T> name(Bits<T> x) {              \
    const T a = value<T>(x);             \
    return bits(static_cast<T>(result)); \
  }
#define BINARY(name, result)                  \
  template <typename T>                       \
  Bits<T> name(Bits<T> x, Bits<T> y) {        \
    const T a = value<T>(x), b = value<T>(y); \
    return bits(static_cast<T>(result));      \
  }
#define TERNARY(name, result)                                  \
  template <typename T>                                        \
  Bits<T> name(Bits<T> x, Bits<T> y, Bits<T> z) {              \
    const T a = value<T>(x), b = value<T>(y), c = value<T>(z); \
    return bits(static_cast<T>(result));                       \
  }

// Subnormal numbers are 0.
template <typename T>
T flushed(T x) {
  return std::abs(x) < std::numeric_limits<T>::min() ? std::copysign(T{0}, x) : x;
}

template <typename T>
T saturated(T x) {
  return x > T{0} ? std::min(x, T{1}) : T{0};  // of NaN 0
}

template <typename T>
T fma_down(T a, T b, T c) {
  const int before = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  volatile T x = a, y = b, z = c;
  const T result = std::fma(x, y, z);
  std::fesetround(before);
  return result;
}

template <typename T>
T smaller(T a, T b) {
  if constexpr (kFloat<T>) {
    return std::fmin(a, b);
  } else {
    return std::min(a, b);
  }
}

template <typename T>
T larger(T a, T b) {
  if constexpr (kFloat<T>) {
    return std::fmax(a, b);
  } else {
    return std::max(a, b);
  }
}

BINARY(add_rn, a + b)
BINARY(sub_rn, a - b)
BINARY(mul_rn, a* b)
BINARY(div_rn, a / b)
BINARY(min, smaller(a, b))
BINARY(max, larger(a, b))
BINARY(copysign, std::copysign(b, a))
TERNARY(fma_rn, std::fma(a, b, c))
TERNARY(fma_rm, fma_down(a, b, c))
UNARY(abs, std::abs(a))
UNARY(sqrt_rn, std::sqrt(a))
UNARY(rcp_rn, 1 / a)
UNARY(rcp_approx_ftz, flushed(1 / flushed(a)))
UNARY(ex2_approx_ftz, flushed(std::exp2(flushed(a))))
#undef UNARY
#undef BINARY
#undef TERNARY

// --- conversions ---------------------------------------------------------------------------------

template <typename To, typename From>
Extended<To> cvt(Bits<From> x) {
  return extended(static_cast<To>(value<From>(x)));
}

template <typename To, typename From>
Extended<To> cvt_rn(Bits<From> x) {
  if constexpr (std::same_as<To, f16>) {
    return extended(__float2half_rn(value<From>(x)));
  } else if constexpr (std::same_as<To, bf16>) {
    return extended(__float2bfloat16_rn(value<From>(x)));
  } else {
    return extended(static_cast<To>(value<From>(x)));
  }
}

template <typename To, typename From>
Extended<To> cvt_sat(Bits<From> x) {
  return extended(static_cast<To>(saturated(value<From>(x))));
}

// A whole number as To, the nearest that To has; of NaN 0.
template <typename To, typename From>
Extended<To> whole(From x) {
  if constexpr (kFloat<To>) {
    return extended(static_cast<To>(x));
  } else {
    using Limits = std::numeric_limits<To>;
    if (std::isnan(x)) return 0;
    if (x <= static_cast<From>(Limits::min())) return Limits::min();
    if (x >= static_cast<From>(Limits::max())) return Limits::max();
    return static_cast<To>(x);
  }
}

#define TO_WHOLE(name, function)                \
  template <typename To, typename From>         \
  Extended<To> name(Bits<From> x) {             \
    return whole<To>(function(value<From>(x))); \
  }
TO_WHOLE(cvt_rni, std::nearbyint)
TO_WHOLE(cvt_rzi, std::trunc)
TO_WHOLE(cvt_rmi, std::floor)
TO_WHOLE(cvt_rpi, std::ceil)
#undef TO_WHOLE

// --- threads that meet ---------------------------------------------------------------------------

inline void bar_sync(u64, const Site& site = Site::current()) { __syncthreads(site); }

template <typename T>
bool vote_sync_all(bool predicate, u32 mask, const Site& site = Site::current()) {
  return __all_sync(mask, predicate, site);
}

template <typename T>
u32 vote_sync_ballot(bool predicate, u32 mask, const Site& site = Site::current()) {
  return __ballot_sync(mask, predicate, site);
}

// A shuffle of the whole warp: what the lane gets, and whether another lane gave it.
inline void require_whole_warp(u32 clamp, u32 expected, const Site& site) {
  if (clamp != expected) fail("a shuffle of a part of a warp", site);
}

template <typename T>
std::pair<u32, bool> shfl_sync_down(u32 x, u32 delta, u32 clamp, u32 mask,
                                    const Site& site = Site::current()) {
  require_whole_warp(clamp, 31, site);
  return {__shfl_down_sync(mask, x, delta, site), threadIdx.x % 32 + delta < 32};
}

template <typename T>
std::pair<u32, bool> shfl_sync_up(u32 x, u32 delta, u32 clamp, u32 mask,
                                  const Site& site = Site::current()) {
  require_whole_warp(clamp, 0, site);
  return {__shfl_up_sync(mask, x, delta, site), threadIdx.x % 32 >= delta};
}

template <typename T>
std::pair<u32, bool> shfl_sync_bfly(u32 x, u32 distance, u32 clamp, u32 mask,
                                    const Site& site = Site::current()) {
  require_whole_warp(clamp, 31, site);
  return {__shfl_xor_sync(mask, x, distance, site), true};
}

// mma: elements of a register are those of simt.h.
template <typename, typename T, typename, typename>
std::array<u32, 4> mma_sync_aligned_m16n8k16_row_col(std::array<u32, 4> a, std::array<u32, 2> b,
                                                     std::array<u32, 4> c,
                                                     const Site& site = Site::current()) {
  auto sums = std::bit_cast<std::array<float, 4>>(c);
  const auto as_array = [](auto& all) -> auto& {
    return reinterpret_cast<std::remove_reference_t<decltype(all[0])>(&)[sizeof(all) / 4]>(all[0]);
  };
  host_cuda::mma_16x8x16<T>(as_array(sums), as_array(a), as_array(b), site);
  return std::bit_cast<std::array<u32, 4>>(sums);
}

// --- blocks that meet ----------------------------------------------------------------------------

template <typename T>
void red_add(u64 at, u64 x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(at), x);
}

template <typename T>
u32 atom_shared_add(u64 at, u32 x) {
  return atomicAdd(reinterpret_cast<unsigned*>(in_shared(at, sizeof(x))), x);
}

template <typename T>
u64 atom_max(u64 at, u64 x) {
  return atomicMax(reinterpret_cast<unsigned long long*>(at), x);
}

template <typename T>
void nanosleep(u32 ns, const Site& site = Site::current()) {
  __nanosleep(ns, site);
}

[[noreturn]] inline void trap(const Site& site = Site::current()) { __trap(site); }

// --- asynchronous copies -------------------------------------------------------------------------

template <typename T>
u64 createpolicy_fractional_L2_evict_last_L2_evict_first(u32) {
  return 0;
}

inline void cp_async_cg_shared_global_L2_cache_hint_L2_128B(u64 to, u64 from, u64 size, u32 bytes,
                                                            u64) {
  host_cuda::copy_async(reinterpret_cast<void*>(in_shared(to, size)),
                        reinterpret_cast<const void*>(from), static_cast<int>(bytes));
}

inline void cp_async_cg_shared_global_L2_cache_hint_L2_128B(u64 to, u64 from, u64 size,
                                                            u64 policy) {
  cp_async_cg_shared_global_L2_cache_hint_L2_128B(to, from, size, static_cast<u32>(size), policy);
}

inline void cp_async_commit_group() { host_cuda::end_group(); }
inline void cp_async_wait_group(u64 later) { host_cuda::wait_for_group(static_cast<int>(later)); }

}  // namespace
