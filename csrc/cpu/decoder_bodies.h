// The inner loops of the decoder, for the instruction set of the file that includes them.
#pragma once

#include "cpu/decoder_kernels.h"
#include "cpu/product_body.h"

namespace accumext::cpu {
namespace {

// The first `count` of kSize elements; zeros behind them.
template <typename T, int kSize>
[[gnu::always_inline]] inline Vector<T, kSize> load_some(const T* from, int64_t count) {
  if (count >= kSize) return raw<Vector<T, kSize>>(from);
  Vector<T, kSize> x{};
  std::memcpy(&x, from, sizeof(T) * count);
  return x;
}

template <typename T>
using Index = std::conditional_t<std::is_same_v<T, float>, int32_t, int64_t>;

template <typename T>
void peaks(const Logits<T>& logits, int64_t begin, int64_t end, T* peak, int64_t* row) {
  constexpr int kSize = kRegister<T>;
  for (int64_t column = 0; column < logits.columns; column += kSize) {
    const int64_t count = logits.columns - column;
    const T* z = logits.z + column;
    Vector<T, kSize> best = load_some<T, kSize>(z + begin * logits.stride, count);
    Vector<Index<T>, kSize> at{};  // rows behind begin
    for (int64_t v = begin + 1; v < end; ++v) {
      const Vector<T, kSize> x = load_some<T, kSize>(z + v * logits.stride, count);
      const auto larger = x > best;
      best = larger ? x : best;
      at = larger ? splat<Index<T>, kSize>(static_cast<Index<T>>(v - begin)) : at;
    }
    for (int i = 0; i < kSize && i < count; ++i) {
      peak[column + i] = best[i];
      row[column + i] = begin + at[i];
    }
  }
}

template <typename T, typename scalar_t, bool kKept, bool kTempered>
void exponentials_as(const Logits<T>& logits, int64_t begin, int64_t end, T* sum, T* tempered) {
  constexpr int kSize = kRegister<T>;
  const Vector<T, kSize> inverse = splat<T, kSize>(static_cast<T>(logits.inverse_temperature));
  auto* exps = static_cast<scalar_t*>(logits.exps);
  for (int64_t column = 0; column < logits.columns; column += kSize) {
    const int64_t count = logits.columns - column;
    const Vector<T, kSize> peak = load_some<T, kSize>(logits.peak + column, count);
    Vector<T, kSize> total{};
    Vector<T, kSize> tempered_total{};
    // Nobody reads them before the deferred products do: whole cache lines go past the caches.
    constexpr size_t kLine = 64;
    const bool whole_lines = sizeof(scalar_t) * kSize == kLine && count >= kSize &&
                             reinterpret_cast<uintptr_t>(exps + column) % kLine == 0 &&
                             logits.exps_stride * sizeof(scalar_t) % kLine == 0;
    for (int64_t v = begin; v < end; ++v) {
      const auto z = load_some<T, kSize>(logits.z + v * logits.stride + column, count) - peak;
      const Vector<T, kSize> e = exp_of_negative<T, kSize>(z);
      total += e;
      if constexpr (kTempered) tempered_total += exp_of_negative<T, kSize>(z * inverse);
      if constexpr (kKept) {
        const auto bits_of_e = rounded<scalar_t, kSize, T>(e);
        scalar_t* to = exps + v * logits.exps_stride + column;
        if (whole_lines) {
          stream(to, bits_of_e);
        } else {
          std::memcpy(to, &bits_of_e, sizeof(scalar_t) * std::min<int64_t>(count, kSize));
        }
      }
    }
    for (int i = 0; i < kSize && i < count; ++i) {
      sum[column + i] = total[i];
      if constexpr (kTempered) tempered[column + i] = tempered_total[i];
    }
  }
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
  if (logits.exps == nullptr) return exponentials_to<T, T, false>(logits, begin, end, sum, tempered);
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
  for (int64_t v = begin; v < end; ++v) {
    const T z = (logits.z[v * logits.stride + column] - logits.peak[column]) *
                static_cast<T>(logits.inverse_temperature);
    sum += exp_of_negative<T, kRegister<T>>(splat<T, kRegister<T>>(z))[0];
    if (sum > threshold) return v;
  }
  return end - 1;
}

// f(offset, count) for every vector of `size` elements.
template <typename T, typename F>
[[gnu::always_inline]] inline void for_each_vector(int64_t size, const F& f) {
  for (int64_t i = 0; i < size; i += kRegister<T>) f(i, size - i);
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
        const auto d = lstm_gradient(upstream, at(dc), sigmoid<T, kSize>(at(gates.pre[0])),
                                     sigmoid<T, kSize>(at(gates.pre[1])),
                                     tanh<T, kSize>(at(gates.pre[2])),
                                     sigmoid<T, kSize>(at(gates.pre[3])), at(gates.c),
                                     tanh<T, kSize>(at(gates.c_after)));
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
        const V slope = kind == CellKind::kRnnTanh ? T(1) - h * h
                                                   : (h > 0 ? splat<T, kSize>(1) : V{});
        write(d_pre[0], upstream * slope);
        write(dh, V{});
      }
    }
  });
}

template <typename T>
constexpr DecoderKernels<T> kDecoderKernels = {product<T>, peaks<T>,   exponentials<T>,
                                               pick<T>,    forward<T>, backward<T>};

}  // namespace
}  // namespace accumext::cpu
