// The inner loops of the decoder, for the instruction set of the file that includes them.
#pragma once

#include "cpu/decoder/distributions_body.h"
#include "cpu/decoder/kernels.h"
#include "cpu/decoder/matmul_body.h"
#include "cpu/decoder/skinny_matmul_body.h"

namespace accumext::cpu {
namespace {

// Tells whether a register holds whole rows of so few columns.
template <typename T>
bool holds_rows(const Logits<T>& logits) {
  const int64_t columns = logits.columns;
  return columns == logits.stride && columns < kRegister<T> && kRegister<T> % columns == 0;
}

template <typename T>
using Index = std::conditional_t<std::is_same_v<T, float>, int32_t, int64_t>;

// Does what `peaks` does, if a register holds whole rows.
template <typename T>
void peaks_of_rows(const Logits<T>& logits, int64_t begin, int64_t end, T* peak, int64_t* row) {
  constexpr int kSize = kRegister<T>;
  const int64_t columns = logits.columns;
  const int64_t step = kSize / columns;  // rows of a register
  auto best = splat<T, kSize>(-std::numeric_limits<T>::infinity());
  Vector<Index<T>, kSize> at{};  // rows behind begin, of the first in the register
  int64_t v = begin;
  for (; v + step <= end; v += step) {
    const auto x = raw<Vector<T, kSize>>(logits.z + v * columns);
    const auto larger = x > best;
    best = larger ? x : best;
    at = larger ? splat<Index<T>, kSize>(static_cast<Index<T>>(v - begin)) : at;
  }
  for (int64_t i = 0; i < columns; ++i) {
    peak[i] = -std::numeric_limits<T>::infinity();
    row[i] = begin;
  }
  const auto take = [&](int64_t i, T x, int64_t where) {
    if (x > peak[i] || (x == peak[i] && where < row[i])) {
      peak[i] = x;
      row[i] = where;
    }
  };
  for (int lane = 0; lane < kSize; ++lane) {
    take(lane % columns, best[lane], begin + at[lane] + lane / columns);
  }
  for (; v < end; ++v) {
    for (int64_t i = 0; i < columns; ++i) take(i, logits.z[v * columns + i], v);
  }
}

template <typename T>
void peaks(const Logits<T>& logits, int64_t begin, int64_t end, T* peak, int64_t* row) {
  if (holds_rows(logits)) return peaks_of_rows(logits, begin, end, peak, row);
  for_columns<T>(logits.columns, [&](auto columns) __attribute__((always_inline)) {
    constexpr int kSize = columns.kSize;
    for (int i = 0; i < columns.kVectors; ++i) {
      Vector<T, kSize> best = columns.load(logits.z + begin * logits.stride, i);
      Vector<Index<T>, kSize> at{};  // rows behind begin
      for (int64_t v = begin + 1; v < end; ++v) {
        const Vector<T, kSize> x = columns.load(logits.z + v * logits.stride, i);
        const auto larger = x > best;
        best = larger ? x : best;
        at = larger ? splat<Index<T>, kSize>(static_cast<Index<T>>(v - begin)) : at;
      }
      const int64_t first = columns.first + i * kSize;
      for (int64_t c = 0; c < std::min<int64_t>(kSize, columns.count - i * kSize); ++c) {
        peak[first + c] = best[c];
        row[first + c] = begin + at[c];
      }
    }
  });
}

// Does what `exponentials` does, if a register holds whole rows.
template <typename T, typename scalar_t, bool kKept, bool kTempered>
void exponentials_of_rows(const Logits<T>& logits, int64_t begin, int64_t end, T* sum,
                          T* tempered) {
  constexpr int kSize = kRegister<T>;
  const int64_t columns = logits.columns;
  const int64_t step = kSize / columns;
  const auto inverse = splat<T, kSize>(static_cast<T>(logits.inverse_temperature));
  Vector<T, kSize> peak, total{}, tempered_total{};
  for (int lane = 0; lane < kSize; ++lane) peak[lane] = logits.peak[lane % columns];
  for (int64_t v = begin; v < end; v += step) {
    const int64_t rows = std::min(step, end - v);
    const auto z = load_some<T, kSize>(logits.z + v * columns, rows * columns) - peak;
    Vector<T, kSize> e = exp_of_negative<T, kSize>(z);
    Vector<T, kSize> t{};
    if constexpr (kTempered) t = exp_of_negative<T, kSize>(z * inverse);
    for (int64_t lane = rows * columns; lane < kSize; ++lane) e[lane] = t[lane] = T(0);
    total += e;
    tempered_total += t;
    if constexpr (kKept) {
      const auto narrow = rounded<scalar_t, kSize, T>(e);
      scalar_t values[kSize];
      std::memcpy(static_cast<void*>(values), &narrow, sizeof(narrow));
      scalar_t* to = static_cast<scalar_t*>(logits.exps) + v * logits.exps_stride;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < columns; ++i)
          to[r * logits.exps_stride + i] = values[r * columns + i];
      }
    }
  }
  for (int64_t i = 0; i < columns; ++i) {
    sum[i] = total[i];
    if constexpr (kTempered) tempered[i] = tempered_total[i];
  }
  for (int64_t lane = columns; lane < kSize; ++lane) {
    sum[lane % columns] += total[lane];
    if constexpr (kTempered) tempered[lane % columns] += tempered_total[lane];
  }
}

template <typename T, typename scalar_t, bool kKept, bool kTempered>
void exponentials_as(const Logits<T>& logits, int64_t begin, int64_t end, T* sum, T* tempered) {
  if (holds_rows(logits)) {
    return exponentials_of_rows<T, scalar_t, kKept, kTempered>(logits, begin, end, sum, tempered);
  }
  for_columns<T>(logits.columns, [&](auto columns) __attribute__((always_inline)) {
    constexpr int kSize = columns.kSize;
    constexpr int kVectors = columns.kVectors;
    const auto inverse = splat<T, kSize>(static_cast<T>(logits.inverse_temperature));
    auto* exps = static_cast<scalar_t*>(logits.exps);
    // Only the deferred products read them, so whole cache lines are written past the caches.
    constexpr size_t kLine = 64;
    const bool streamed = columns.kWhole && sizeof(scalar_t) * kSize * kVectors % kLine == 0 &&
                          reinterpret_cast<uintptr_t>(exps + columns.first) % kLine == 0 &&
                          logits.exps_stride * sizeof(scalar_t) % kLine == 0;
    Vector<T, kSize> peak[kVectors], total[kVectors] = {}, tempered_total[kVectors] = {};
    for (int i = 0; i < kVectors; ++i) peak[i] = columns.load(logits.peak, i);
    for (int64_t v = begin; v < end; ++v) {
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) {
        const Vector<T, kSize> z = columns.load(logits.z + v * logits.stride, i) - peak[i];
        const Vector<T, kSize> e = exp_of_negative<T, kSize>(z);
        total[i] += e;
        if constexpr (kTempered) tempered_total[i] += exp_of_negative<T, kSize>(z * inverse);
        if constexpr (kKept) {
          const auto narrow = rounded<scalar_t, kSize, T>(e);
          scalar_t* to = exps + v * logits.exps_stride;
          if (streamed) {
            stream(to + columns.first + i * kSize, narrow);
          } else {
            columns.store(to, i, narrow);
          }
        }
      }
    }
    for (int i = 0; i < kVectors; ++i) {
      const int64_t first = columns.first + i * kSize;
      for (int64_t c = 0; c < std::min<int64_t>(kSize, columns.count - i * kSize); ++c) {
        sum[first + c] = total[i][c];
        if constexpr (kTempered) tempered[first + c] = tempered_total[i][c];
      }
    }
  });
  if constexpr (kKept) finish_streaming();
}

template <typename T, typename scalar_t, bool kKept>
void exponentials_to(const Logits<T>& logits, int64_t begin, int64_t end, T* sum, T* tempered) {
  if (tempered != nullptr) {
    exponentials_as<T, scalar_t, kKept, true>(logits, begin, end, sum, tempered);
  } else {
    exponentials_as<T, scalar_t, kKept, false>(logits, begin, end, sum, tempered);
  }
}

template <typename T>
void exponentials(const Logits<T>& logits, int64_t begin, int64_t end, T* sum, T* tempered) {
  if (logits.exps == nullptr)
    return exponentials_to<T, T, false>(logits, begin, end, sum, tempered);
  if constexpr (std::is_same_v<T, float>) {
    if (logits.exps_dtype == Dtype::kBFloat16) {
      using torch::headeronly::BFloat16;
      return exponentials_to<T, BFloat16, true>(logits, begin, end, sum, tempered);
    }
  }
  exponentials_to<T, T, true>(logits, begin, end, sum, tempered);
}

template <typename T>
int64_t pick(const Logits<T>& logits, int64_t column, int64_t begin, int64_t end,
             double threshold) {
  double sum = 0.0;
  int64_t possible = begin;
  for (int64_t v = begin; v < end; ++v) {
    const T z = (logits.z[v * logits.stride + column] - logits.peak[column]) *
                static_cast<T>(logits.inverse_temperature);
    const T e = exp_of_negative<T, kRegister<T>>(splat<T, kRegister<T>>(z))[0];
    sum += e;
    if (e > 0) possible = v;
    if (sum > threshold) break;
  }
  return possible;
}

// f(offset, count) for every vector of `size` elements.
template <typename T, typename F>
[[gnu::always_inline]] inline void for_each_vector(int64_t size, const F& f) {
  for (int64_t i = 0; i < size; i += kRegister<T>) f(i, size - i);
}

template <typename T>
void round(Dtype dtype, T* x, int64_t size) {
  constexpr int kSize = kRegister<T>;
  with_dtype<T>(dtype, [&](auto type) {
    using scalar_t = decltype(type);
    if constexpr (!std::is_same_v<T, scalar_t>) {
      for_each_vector<T>(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const auto narrow = rounded<scalar_t, kSize, T>(load_some<T, kSize>(x + i, count));
        scalar_t values[kSize];
        std::memcpy(static_cast<void*>(values), &narrow, sizeof(narrow));
        store<T, kSize>(x + i, load<T, kSize, scalar_t>(values), count);
      });
    }
  });
}

template <typename T>
void forward(CellKind kind, const Gates<T>& gates, T* h_out, T* c_out) {
  constexpr int kSize = kRegister<T>;
  using V = Vector<T, kSize>;
  for_each_vector<T>(gates.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const auto pre = [&](int g) { return load_some<T, kSize>(gates.pre[g] + i, count); };
    V h;
    switch (kind) {
      case CellKind::kGru: {
        const V r = sigmoid<T, kSize>(pre(0));
        const V z = sigmoid<T, kSize>(pre(1));
        const V n = tanh<T, kSize>(pre(2) + r * pre(3));
        h = gru_state(z, n, load_some<T, kSize>(gates.h + i, count));
        break;
      }
      case CellKind::kLstm: {
        const V c = lstm_memory(sigmoid<T, kSize>(pre(0)), sigmoid<T, kSize>(pre(1)),
                                tanh<T, kSize>(pre(2)), load_some<T, kSize>(gates.c + i, count));
        h = sigmoid<T, kSize>(pre(3)) * tanh<T, kSize>(c);
        store<T, kSize>(c_out + i, c, count);
        break;
      }
      case CellKind::kRnnTanh:
        h = tanh<T, kSize>(pre(0));
        break;
      default: {
        const V x = pre(0);
        h = x < 0 ? V{} : x;  // a NaN stays one
      }
    }
    store<T, kSize>(h_out + i, h, count);
  });
}

template <typename T>
void backward(CellKind kind, const Gates<T>& gates, T* dh, T* dc, T* const* d_pre) {
  constexpr int kSize = kRegister<T>;
  using V = Vector<T, kSize>;
  for_each_vector<T>(gates.size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const auto at = [&](const T* from) { return load_some<T, kSize>(from + i, count); };
    const auto write = [&](T* to, const V& x) { store<T, kSize>(to + i, x, count); };
    const V upstream = at(dh);
    switch (kind) {
      case CellKind::kGru: {
        const V r = sigmoid<T, kSize>(at(gates.pre[0]));
        const V z = sigmoid<T, kSize>(at(gates.pre[1]));
        const V n_h = at(gates.pre[3]);
        const V n = tanh<T, kSize>(at(gates.pre[2]) + r * n_h);
        const auto d = gru_gradient(upstream, r, z, n, n_h, at(gates.h));
        write(d_pre[0], d.r_pre);
        write(d_pre[1], d.z_pre);
        write(d_pre[2], d.n_x);
        write(d_pre[3], d.n_h);
        write(dh, d.h);
        break;
      }
      case CellKind::kLstm: {
        const auto d = lstm_gradient(
            upstream, at(dc), sigmoid<T, kSize>(at(gates.pre[0])),
            sigmoid<T, kSize>(at(gates.pre[1])), tanh<T, kSize>(at(gates.pre[2])),
            sigmoid<T, kSize>(at(gates.pre[3])), at(gates.c), tanh<T, kSize>(at(gates.c_after)));
        write(d_pre[0], d.i_pre);
        write(d_pre[1], d.f_pre);
        write(d_pre[2], d.g_pre);
        write(d_pre[3], d.o_pre);
        write(dc, d.c);
        write(dh, V{});
        break;
      }
      default: {
        const V h = at(gates.h);  // after the step
        const V slope =
            kind == CellKind::kRnnTanh ? T(1) - h * h : (h > 0 ? splat<T, kSize>(1) : V{});
        write(d_pre[0], upstream * slope);
        write(dh, V{});
      }
    }
  });
}

template <typename T>
constexpr DecoderKernels<T> kDecoderKernels = {
    kPanelTerms, product<T>,      read<T>, round<T>, pack<T>,          pack_rows<T>, multiply<T>,
    peaks<T>,    exponentials<T>, pick<T>, sum<T>,   differentiate<T>, forward<T>,   backward<T>};

}  // namespace
}  // namespace accumext::cpu
