// The bodies of the CPU kernels, for the instruction set of the kernels_*.cpp that includes this.
//
// A chunk is cut into pieces and these into blocks of lanes. Each lane of a piece has a sum of its
// own, in acc_t; lanes are folded in a fixed tree and pieces added in double, in order. So the bits
// of a sum depend neither on the instruction set nor on the number of threads.
#pragma once

#include "cpu/blocks.h"
#include "cpu/kernels.h"
#include "cpu/simd/types.h"
#include "cpu/simd/vectors.h"
#include "math/accumulate.h"
#include "math/norm.h"

namespace accumext::cpu {
namespace {

constexpr int64_t kPieceSize = 2048;  // elements: 64 additions in float per lane

template <typename acc_t>
constexpr int kLanes = 128 / sizeof(acc_t);  // hides the latency of an addition
template <typename acc_t>
constexpr int kWidth = kVectorBytes / sizeof(acc_t);
template <typename acc_t>
constexpr int kVectors = kLanes<acc_t> / kWidth<acc_t>;  // of a block

// Partial sums of a piece, one per lane, in registers.
template <typename acc_t, int kSize, int kCount>
struct Lanes {
  Vector<acc_t, kSize> part[kCount];

  [[gnu::always_inline]] explicit Lanes(acc_t x) {
    for (auto& vector : part) vector = splat<acc_t, kSize>(x);
  }

  // combine(a, b) over all lanes: each half with the other, until one is left.
  template <typename Combine>
  [[gnu::always_inline]] acc_t folded(const Combine& combine) const {
    acc_t lane[kSize * kCount];
    std::memcpy(lane, part, sizeof(lane));
    halve<kSize * kCount / 2>(lane, combine);
    return lane[0];
  }

 private:
  template <int kHalf, typename Combine>
  [[gnu::always_inline]] static void halve(acc_t* lane, const Combine& combine) {
    for (int i = 0; i < kHalf; ++i) lane[i] = combine(lane[i], lane[i + kHalf]);
    if constexpr (kHalf > 1) halve<kHalf / 2>(lane, combine);
  }
};

// The sums of a piece whose elements are computed in acc_t and whose norm is formed in norm_t.
template <NormKind kKind, typename norm_t, typename acc_t>
struct Totals : Lanes<norm_t, kWidth<acc_t>, kVectors<acc_t>> {
  static constexpr int kSize = kWidth<acc_t>;
  const Norm<kKind>& norm;

  [[gnu::always_inline]] explicit Totals(const Norm<kKind>& norm)
      : Totals::Lanes(norm.template identity<norm_t>()), norm(norm) {}

  // x: elements [i * kSize, (i + 1) * kSize) of a block of count.
  template <typename Count>
  [[gnu::always_inline]] void add(int i, Count count, Vector<norm_t, kSize> x) {
    auto& total = this->part[i];
    const auto sum = norm.combine(total, terms(x));
    if constexpr (std::is_same_v<Count, int>) {
      total = iota<norm_t, kSize>() < norm_t(count - i * kSize) ? sum : total;
    } else {
      total = sum;
    }
  }

  [[gnu::always_inline]] double total() const {
    return this->folded([](norm_t a, norm_t b) { return Norm<kKind>::combine(a, b); });
  }

 private:
  [[gnu::always_inline]] Vector<norm_t, kSize> terms(Vector<norm_t, kSize> x) const {
    if constexpr (kKind == NormKind::kPowers) {
      for (int lane = 0; lane < kSize; ++lane) x[lane] = norm.term(norm_t(x[lane]));
      return x;
    } else {
      return norm.term(x);
    }
  }
};

// Finds whether all elements of a piece are finite.
template <typename acc_t>
struct Probes : Lanes<acc_t, kWidth<acc_t>, kVectors<acc_t>> {
  [[gnu::always_inline]] Probes() : Probes::Lanes(acc_t(0)) {}

  [[gnu::always_inline]] void add(int i, Vector<acc_t, kWidth<acc_t>> x) {
    this->part[i] += nonfinite_probe(x);
  }

  [[gnu::always_inline]] bool finite() const {
    return is_finite_probe(this->folded([](acc_t a, acc_t b) { return a + b; }));
  }
};

// partial(walker, size) over the pieces of a chunk.
template <NormKind kKind, int kOperands, typename F>
[[gnu::always_inline]] inline Partial over_pieces(const Norm<kKind>& norm,
                                                  const Layout<kOperands>& layout,
                                                  const Chunk& chunk, const F& partial) {
  Walker<kOperands> walker(layout, chunk);
  Partial total = norm.none();
  for (int64_t left = chunk.end - chunk.begin; left > 0; left -= kPieceSize) {
    total = norm.combine(total, partial(walker, std::min(left, kPieceSize)));
  }
  return total;
}

//   reads   grad, scalar_t, [end - begin]
template <typename scalar_t>
bool all_finite(const Span& span, const Chunk& chunk) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kWidth<acc_t>;
  Probes<acc_t> probes;
  const auto body = [&](auto, const scalar_t* grad) __attribute__((always_inline)) {
    for (int i = 0; i < kVectors<acc_t>; ++i) probes.add(i, load<acc_t, kSize>(grad + i * kSize));
  };
  Walker<1> walker(span.layout, chunk);
  for_each_block<kLanes<acc_t>>(walker, chunk.end - chunk.begin, body,
                                static_cast<const scalar_t*>(span.data));
  return probes.finite();
}

// A finite total proves every element finite, unless the norm ignores large ones; elements are
// tested only without this proof.
//
//   reads   grad, scalar_t, [end - begin]
template <typename scalar_t, NormKind kKind>
Partial norm_chunk(const Span& span, const Chunk& chunk, const Norm<kKind>& norm,
                   double inv_scale) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kWidth<acc_t>;
  const auto factor = splat<acc_t, kSize>(static_cast<acc_t>(inv_scale));
  const auto piece = [&](Walker<1>& walker, int64_t size) __attribute__((always_inline)) {
    Totals<kKind, acc_t, acc_t> totals(norm);
    const auto body = [&](auto count, const scalar_t* grad) __attribute__((always_inline)) {
      prefetch<kLanes<acc_t>, 256>(grad);
      for (int i = 0; i < kVectors<acc_t>; ++i) {
        totals.add(i, count, scaled(load<acc_t, kSize>(grad + i * kSize), factor));
      }
    };
    for_each_block<kLanes<acc_t>>(walker, size, body, static_cast<const scalar_t*>(span.data));
    return Partial{totals.total(), true};
  };
  Partial partial = over_pieces(norm, span.layout, chunk, piece);
  const bool proof = norm.grows() && is_finite_probe(nonfinite_probe(partial.total));
  partial.finite = proof || all_finite<scalar_t>(span, chunk);
  return partial;
}

template <typename scalar_t>
Partial norm_chunk(const Span& span, const Chunk& chunk, NormKind kind, double p,
                   double inv_scale) {
  switch (kind) {
    case NormKind::kAbs:
      return norm_chunk<scalar_t>(span, chunk, Norm<NormKind::kAbs>{p}, inv_scale);
    case NormKind::kSquares:
      return norm_chunk<scalar_t>(span, chunk, Norm<NormKind::kSquares>{p}, inv_scale);
    case NormKind::kMax:
      return norm_chunk<scalar_t>(span, chunk, Norm<NormKind::kMax>{p}, inv_scale);
    case NormKind::kMin:
      return norm_chunk<scalar_t>(span, chunk, Norm<NormKind::kMin>{p}, inv_scale);
    default:
      return norm_chunk<scalar_t>(span, chunk, Norm<NormKind::kPowers>{p}, inv_scale);
  }
}

//   reads   grad, grad_t, [end - begin]; main_grad unless kOverwrite
//   writes  main_grad, main_t, [end - begin]
template <typename main_t, typename grad_t, bool kOverwrite>
Partial accumulate_chunk(const Pair& pair, const Chunk& chunk, const Accumulation& how) {
  using acc_t = acc_type<main_t, grad_t>;
  using norm_t = acc_type<main_t>;
  constexpr int kSize = kWidth<acc_t>;
  const Norm<NormKind::kSquares> norm{2.0};
  const auto factor = splat<acc_t, kSize>(
      scaled(static_cast<acc_t>(how.clip_coef), static_cast<acc_t>(how.inv_scale)));
  main_t* const main_grads = static_cast<main_t*>(pair.main_grad);
  const bool streamed = kOverwrite && how.streamed && pair.layout.empty() &&
                        reinterpret_cast<uintptr_t>(main_grads) % kVectorBytes == 0;
  const auto piece = [&](Walker<2>& walker, int64_t size) __attribute__((always_inline)) {
    Totals<NormKind::kSquares, norm_t, acc_t> totals(norm);
    Probes<acc_t> probes;
    const auto body = [&](auto count, main_t* main_grad,
                          const grad_t* grad) __attribute__((always_inline)) {
      constexpr bool kWhole = !std::is_same_v<decltype(count), int>;
      prefetch<kLanes<acc_t>, 512>(grad);
      if (!kOverwrite) prefetch<kLanes<acc_t>, 512>(main_grad);
      for (int i = 0; i < kVectors<acc_t>; ++i, main_grad += kSize, grad += kSize) {
        const auto g = load<acc_t, kSize>(grad);
        auto updated = scaled(g, factor);
        if constexpr (!kOverwrite) {
          updated = accumulated(load<acc_t, kSize>(main_grad), g, factor);
        }
        const auto stored = rounded<main_t, kSize, acc_t>(updated);
        if (kOverwrite && kWhole && streamed) {
          stream(main_grad, stored);
        } else {
          std::memcpy(main_grad, &stored, sizeof(stored));
        }
        totals.add(i, count, load<norm_t, kSize>(reinterpret_cast<const main_t*>(&stored)));
        probes.add(i, g);
      }
    };
    for_each_block<kLanes<acc_t>>(walker, size, body, main_grads,
                                  static_cast<const grad_t*>(pair.grad));
    return Partial{totals.total(), probes.finite()};
  };
  const Partial partial = over_pieces(norm, pair.layout, chunk, piece);
  if (streamed) finish_streaming();
  return partial;
}

//   reads and writes  grad, scalar_t, [end - begin]
template <typename scalar_t>
void scale_chunk(const Span& span, const Chunk& chunk, double factor) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSize = kWidth<acc_t>;
  const auto multiplier = splat<acc_t, kSize>(static_cast<acc_t>(factor));
  const auto body = [&](auto, scalar_t* grad) __attribute__((always_inline)) {
    for (int i = 0; i < kVectors<acc_t>; ++i, grad += kSize) {
      const auto stored =
          rounded<scalar_t, kSize, acc_t>(scaled(load<acc_t, kSize>(grad), multiplier));
      std::memcpy(grad, &stored, sizeof(stored));
    }
  };
  Walker<1> walker(span.layout, chunk);
  for_each_block<kLanes<acc_t>>(walker, chunk.end - chunk.begin, body,
                                static_cast<scalar_t*>(span.data));
}

Partial norm(const Span& grad, const Chunk& chunk, NormKind kind, double p, double inv_scale) {
  return with_type(grad.dtype, [&](auto type) {
    return norm_chunk<decltype(type)>(grad, chunk, kind, p, inv_scale);
  });
}

Partial accumulate(const Pair& pair, const Chunk& chunk, const Accumulation& how) {
  return with_type(pair.main_dtype, [&](auto main_type) {
    return with_type(pair.grad_dtype, [&](auto grad_type) {
      using main_t = decltype(main_type);
      using grad_t = decltype(grad_type);
      return how.overwrite ? accumulate_chunk<main_t, grad_t, true>(pair, chunk, how)
                           : accumulate_chunk<main_t, grad_t, false>(pair, chunk, how);
    });
  });
}

void scale(const Span& grad, const Chunk& chunk, double factor) {
  with_type(grad.dtype, [&](auto type) { scale_chunk<decltype(type)>(grad, chunk, factor); });
}

}  // namespace
}  // namespace accumext::cpu
