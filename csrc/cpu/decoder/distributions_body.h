// The inner loops of a loss of whole distributions: entropy, and the distance to a teacher.
#pragma once

#include "cpu/decoder/columns.h"

namespace accumext::cpu {
namespace {

template <typename T, bool kTempered, bool kTeaches, typename Columns>
[[gnu::always_inline]] inline auto terms_of(const Distributions<T>& all, const Columns& columns,
                                            int64_t v, int i) {
  constexpr int kSize = Columns::kSize;
  const auto inverse = splat<T, kSize>(static_cast<T>(all.inverse_temperature));
  DistributionTerms<Vector<T, kSize>> terms{};
  terms.d = columns.load(all.z + v * all.stride, i) - columns.load(all.peak, i);
  terms.e = exp_of_negative<T, kSize>(terms.d);
  terms.log_tempered = terms.d * inverse;
  terms.tempered = kTempered ? exp_of_negative<T, kSize>(terms.log_tempered) : terms.e;
  if constexpr (kTeaches) {
    const auto d = columns.load(all.teacher + v * all.stride, i);
    terms.log_teacher = (d - columns.load(all.teacher_peak, i)) * inverse;
    terms.teacher = exp_of_negative<T, kSize>(terms.log_teacher);
  }
  return terms;
}

template <typename T, bool kTempered, bool kTeaches>
void sum_of(const Distributions<T>& all, int64_t begin, int64_t end, T* sums) {
  for_columns<T>(all.columns, [&](auto columns) __attribute__((always_inline)) {
    constexpr int kSize = columns.kSize;
    for (int i = 0; i < columns.kVectors; ++i) {
      Vector<T, kSize> total[kDistributionSums] = {};
      for (int64_t v = begin; v < end; ++v) {
        add_terms(terms_of<T, kTempered, kTeaches>(all, columns, v, i), kTeaches, total);
      }
      const int64_t first = columns.first + i * kSize;
      for (int64_t c = 0; c < std::min<int64_t>(kSize, columns.count - i * kSize); ++c) {
        for (int s = 0; s < kDistributionSums; ++s) sums[s * all.columns + first + c] = total[s][c];
      }
    }
  });
}

template <typename T, typename scalar_t, bool kTempered, bool kTeaches>
void differentiate_to(const Distributions<T>& all, int64_t begin, int64_t end) {
  for_columns<T>(all.columns, [&](auto columns) __attribute__((always_inline)) {
    constexpr int kSize = columns.kSize;
    auto* gradients = static_cast<scalar_t*>(all.gradients);
    for (int i = 0; i < columns.kVectors; ++i) {
      const DistributionFactors<Vector<T, kSize>> factors{
          columns.load(all.factors.of_exp, i), columns.load(all.factors.of_product, i),
          columns.load(all.factors.of_tempered, i), columns.load(all.factors.of_teacher, i)};
      for (int64_t v = begin; v < end; ++v) {
        const auto terms = terms_of<T, kTempered, kTeaches>(all, columns, v, i);
        const auto g = distribution_gradient(terms, kTeaches, factors);
        columns.store(all.z + v * all.stride, i, g);
        columns.store(gradients + v * all.gradients_stride, i, rounded<scalar_t, kSize, T>(g));
      }
    }
  });
}

// Calls f(whether the temperature is not 1, whether there is a teacher), with constants.
template <typename T, typename F>
void with_options(const Distributions<T>& all, const F& f) {
  const auto with_teacher = [&](auto tempered) {
    all.teacher != nullptr ? f(tempered, std::true_type()) : f(tempered, std::false_type());
  };
  all.inverse_temperature != 1.0 ? with_teacher(std::true_type()) : with_teacher(std::false_type());
}

template <typename T>
void sum(const Distributions<T>& all, int64_t begin, int64_t end, T* sums) {
  with_options(all, [&](auto tempered, auto teaches) {
    sum_of<T, tempered, teaches>(all, begin, end, sums);
  });
}

template <typename T>
void differentiate(const Distributions<T>& all, int64_t begin, int64_t end) {
  with_dtype<T>(all.gradients_dtype, [&](auto type) {
    with_options(all, [&](auto tempered, auto teaches) {
      differentiate_to<T, decltype(type), tempered, teaches>(all, begin, end);
    });
  });
}

}  // namespace
}  // namespace accumext::cpu
