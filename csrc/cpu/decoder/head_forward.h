// The output layer on a few rows: logits, their statistics, tokens, exponentials.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/decoder/skinny_matmul.h"
#include "cpu/decoder/token_filters.h"
#include "cpu/team.h"

namespace accumext::cpu {

// The memory to which a head writes the largest logits of its rows.
template <typename T>
struct TopRows {
  int64_t count;
  int64_t size;     // k
  T* logits;        // [count, k], largest first; equal ones in the order of the vocabulary
  int64_t* tokens;  // [count, k]: the tokens of these logits
  T* peak;          // [count]: the largest logit
  T* total;         // [count]: sum of exp(z - peak)
};

// The memory to which a head writes samples of the most probable tokens of its rows.
template <typename T>
struct SampledRows {
  int64_t count;
  int64_t top_k;
  double top_p;
  const double* uniforms;  // [count], in [0, 1)
  int64_t* tokens;         // [count]
  T* peak;                 // [count]
  T* total;                // [count]
  T* logit;                // [count]: of the token
};

// The arguments of a head for its rows, and the memory to which it writes the results.
template <typename T>
struct HeadRows {
  int64_t count;
  const int64_t* targets;  // [count], in [0, V); null: the tokens
  const double* uniforms;  // [count] in [0, 1): sample; null: take the argmax
  int64_t* tokens;         // [count]
  T* peak;                 // [count]: the largest logit
  T* total;                // [count]: sum of exp(z - peak)
  T* target_logit;         // [count]
  void* exps;              // [V, exps_stride]: exp(z - peak), 0 at the target; null: not wanted
};

// The arguments of a loss of whole distributions, and the memory to which its results go.
template <typename T>
struct ObjectiveRows {
  int64_t count;
  const int64_t* targets;  // [count], in [0, V)
  const T* share;          // [count]: of the logsumexp in the loss
  DistributionRules rules;
  const T* probabilities;  // [count, size] of the teacher's tokens; null: none
  const int64_t* indices;  // [count, size] with a stride: these tokens
  int64_t index_stride;
  int64_t size;
  int64_t* tokens;                                                 // [count]: the argmax
  T *lse, *target_logit, *entropy, *divergence, *target_gradient;  // [count]
  void* gradients;  // [V, exps_stride]: 0 at the target
};

template <typename T>
class Head {
 public:
  // Takes at most `logit_rows` rows at once: [V, logit_rows] logits exist.
  Head(Team& team, const Tensor& weight, const T* bias, int64_t logit_rows, double temperature,
       Dtype exps_dtype, int64_t exps_stride)
      : team_(team),
        logit_rows_(logit_rows),
        product_(weight, bias, logit_rows),
        inverse_temperature_(1.0 / temperature),
        exps_dtype_(exps_dtype),
        exps_stride_(exps_stride),
        logits_(torch::stable::new_empty(weight, {product_.rows, logit_rows}, kScalarType<T>)),
        spans_((product_.rows + kSpan - 1) / kSpan),
        sums_(spans_ * logit_rows),
        tempered_(spans_ * logit_rows),
        peaks_(spans_ * logit_rows),
        at_(spans_ * logit_rows) {}

  int64_t logit_rows() const { return logit_rows_; }
  int64_t vocabulary() const { return product_.rows; }
  int64_t depth() const { return product_.depth; }

  // Rows are the columns of hidden [H, stride], or those in `named`; at most logit_rows().
  void evaluate(const T* hidden, int64_t stride, const int64_t* named, const HeadRows<T>& rows) {
    const int64_t n = rows.count;
    const bool tempered = rows.uniforms != nullptr && inverse_temperature_ != 1.0;
    const Logits<T> logits = products(hidden, stride, named, n, rows.peak, rows.tokens);
    exponentials(
        {logits.z, n, n, rows.peak, inverse_temperature_, rows.exps, exps_dtype_, exps_stride_},
        tempered);
    for (int64_t i = 0; i < n; ++i) {
      rows.total[i] = static_cast<T>(column_sum(sums_, n, i));
      if (!took_first(logits, rows, i) && rows.uniforms != nullptr) {
        rows.tokens[i] = sample(logits, i, rows.uniforms[i], tempered ? tempered_ : sums_);
      }
      const int64_t target = rows.targets == nullptr ? rows.tokens[i] : rows.targets[i];
      rows.target_logit[i] = logits.z[target * n + i];
      if (rows.exps != nullptr) erase(rows.exps, target * exps_stride_ + i);
    }
  }

  // Does the same for the largest logits.
  void largest(const T* hidden, int64_t stride, const TopRows<T>& rows) {
    const int64_t n = rows.count;
    const Logits<T> logits = products(hidden, stride, nullptr, n, rows.peak, nullptr);
    exponentials(logits, /*tempered=*/false);
    for (int64_t i = 0; i < n; ++i) rows.total[i] = static_cast<T>(column_sum(sums_, n, i));
    for_each_row(n, [&](int64_t i) {
      const std::vector<Token<T>> found = largest_of(logits, i, rows.size, rows.total[i]);
      rows.peak[i] = found[0].logit;
      for (int64_t k = 0; k < rows.size; ++k) {
        rows.logits[i * rows.size + k] = found[k].logit;
        rows.tokens[i * rows.size + k] = found[k].token;
      }
    });
  }

  // Does the same for samples of the most probable tokens.
  void sample_top(const T* hidden, int64_t stride, const SampledRows<T>& rows) {
    const int64_t n = rows.count;
    const Logits<T> logits = products(hidden, stride, nullptr, n, rows.peak, nullptr);
    exponentials(logits, /*tempered=*/false);
    for (int64_t i = 0; i < n; ++i) rows.total[i] = static_cast<T>(column_sum(sums_, n, i));
    const bool by_share = rows.top_k == product_.rows;  // all tokens are candidates
    if (by_share) temper(logits);
    for_each_row(n, [&](int64_t i) {
      if (took_first(logits, rows, i)) {
        rows.logit[i] = rows.peak[i];
        return;
      }
      if (by_share) {
        TopPFilter<T> filter(elements<T>(*weights_) + i, n, product_.rows);
        filter.keep(rows.top_p, logits.z + i, n);
        rows.tokens[i] = filter.sample(rows.uniforms[i]);
      } else {
        std::vector<Token<T>> found = largest_of(logits, i, rows.top_k, rows.total[i]);
        rows.tokens[i] = sample_of(found, inverse_temperature_, rows.top_p, rows.uniforms[i]);
      }
      rows.logit[i] = logits.z[rows.tokens[i] * n + i];
    });
  }

  // The loss of whole distributions at the head's temperature, with the logits of `teacher`.
  void differentiate(const T* hidden, int64_t stride, Head* teacher, const T* teacher_hidden,
                     const ObjectiveRows<T>& rows) {
    const int64_t n = rows.count;
    std::vector<T> peak(n), teacher_peak(n), factors(4 * n);
    const Logits<T> logits = products(hidden, stride, nullptr, n, peak.data(), rows.tokens);
    Distributions<T> all{.z = logits.z,
                         .stride = n,
                         .columns = n,
                         .peak = peak.data(),
                         .teacher = nullptr,
                         .teacher_peak = teacher_peak.data(),
                         .inverse_temperature = inverse_temperature_,
                         .factors = {factors.data(), factors.data() + n, factors.data() + 2 * n,
                                     factors.data() + 3 * n},
                         .gradients = rows.gradients,
                         .gradients_dtype = exps_dtype_,
                         .gradients_stride = exps_stride_};
    if (teacher != nullptr) {
      all.teacher =
          teacher->products(teacher_hidden, stride, nullptr, n, teacher_peak.data(), nullptr).z;
    }
    const Buffer<T> partial(spans_ * kDistributionSums * n);
    for_each_span([&](int64_t span, int64_t begin, int64_t end) {
      decoder_kernels<T>().sum(all, begin, end, &partial[span * kDistributionSums * n]);
    });
    for (int64_t i = 0; i < n; ++i) {
      double sums[kDistributionSums];
      for (int s = 0; s < kDistributionSums; ++s)
        sums[s] = column_sum(partial, kDistributionSums * n, s * n + i);
      reduce(logits, sums, teacher != nullptr, i, rows, factors.data() + i, n);
    }
    if (rows.gradients == nullptr) return;
    for_each_span([&](int64_t, int64_t begin, int64_t end) {
      decoder_kernels<T>().differentiate(all, begin, end);
    });
    for (int64_t i = 0; i < n; ++i) correct(logits, i, rows);
  }

 private:
  // Finds row i's results from sums over the vocabulary, and the factors of its gradient.
  void reduce(const Logits<T>& logits, const double (&sums)[kDistributionSums], bool taught,
              int64_t i, const ObjectiveRows<T>& rows, T* factors, int64_t n) const {
    const double peak = logits.peak[i], log_tempered = std::log(sums[kOfTempered]);
    if (std::isnan(sums[kOfExp]))
      rows.tokens[i] = largest_of(logits, i, 1, static_cast<T>(sums[kOfExp]))[0].token;
    double divergence = 0.0, mass = 0.0;
    for (int64_t k = 0; k < rows.size; ++k) {
      const double q = rows.probabilities[i * rows.size + k];
      const double z = logits.z[rows.indices[i * rows.index_stride + k] * n + i];
      mass += q;
      divergence += divergence_term(q, (z - peak) * inverse_temperature_ - log_tempered);
    }
    const Distribution row =
        distribution_of(sums, peak, rows.share[i], taught, divergence, mass, rows.rules);
    rows.lse[i] = static_cast<T>(row.lse);
    rows.entropy[i] = static_cast<T>(row.entropy);
    rows.divergence[i] = static_cast<T>(row.divergence);
    rows.target_logit[i] = logits.z[rows.targets[i] * n + i];
    factors[0] = static_cast<T>(row.factors.of_exp);
    factors[n] = static_cast<T>(row.factors.of_product);
    factors[2 * n] = static_cast<T>(row.factors.of_tempered);
    factors[3 * n] = static_cast<T>(row.factors.of_teacher);
  }

  // Takes the teacher's tokens and the target out of the gradient of row i.
  void correct(const Logits<T>& logits, int64_t i, const ObjectiveRows<T>& rows) const {
    const int64_t n = rows.count;
    const T scale = static_cast<T>(rows.rules.soft_scale);
    const auto put = [&](int64_t v, T value) {
      with_type(exps_dtype_, [&](auto type) {
        using Kept = decltype(type);
        using From = std::conditional_t<std::is_same_v<Kept, double>, double, float>;
        auto* gradients = static_cast<Kept*>(rows.gradients);
        gradients[v * exps_stride_ + i] = static_cast<From>(value);
      });
    };
    for (int64_t k = 0; k < rows.size; ++k) {
      const int64_t v = rows.indices[i * rows.index_stride + k];
      T& gradient = logits.z[v * n + i];
      gradient -= scale * rows.probabilities[i * rows.size + k];
      put(v, gradient);
    }
    const int64_t target = rows.targets[i];
    rows.target_gradient[i] = logits.z[target * n + i];
    put(target, T(0));
  }

  // Computes the logits, the largest one of each row and, unless null, its token.
  Logits<T> products(const T* hidden, int64_t stride, const int64_t* named, int64_t n, T* peak,
                     int64_t* argmax) {
    const DecoderKernels<T>& kernels = decoder_kernels<T>();
    product_.take(hidden, stride, n, named);
    const Logits<T> logits{static_cast<T*>(logits_.mutable_data_ptr()),
                           n,
                           n,
                           peak,
                           inverse_temperature_,
                           nullptr,
                           exps_dtype_,
                           exps_stride_};
    for_each_span([&](int64_t span, int64_t begin, int64_t end) {
      product_.run(begin, end, logits.z, n);
      kernels.peaks(logits, begin, end, &peaks_[span * n], &at_[span * n]);
    });
    for (int64_t i = 0; i < n; ++i) {
      int64_t best = 0;
      for (int64_t span = 1; span < spans_; ++span) {
        if (peaks_[span * n + i] > peaks_[best * n + i]) best = span;
      }
      peak[i] = peaks_[best * n + i];
      if (argmax != nullptr) argmax[i] = at_[best * n + i];
    }
    return logits;
  }

  // Sums of the exponentials of every span.
  void exponentials(const Logits<T>& logits, bool tempered) {
    const int64_t n = logits.columns;
    for_each_span([&](int64_t span, int64_t begin, int64_t end) {
      decoder_kernels<T>().exponentials(logits, begin, end, &sums_[span * n],
                                        tempered ? &tempered_[span * n] : nullptr);
    });
  }

  // exp((z - peak) / temperature) into weights_, [V, n].
  void temper(const Logits<T>& logits) {
    const int64_t n = logits.columns;
    if (!weights_) weights_ = torch::stable::new_empty(logits_, {product_.rows, logit_rows_});
    T* weights = elements<T>(*weights_);
    const std::vector<T> zero(n);
    const T inverse = static_cast<T>(inverse_temperature_);
    const Logits<T> scaled{weights, n, n, zero.data(), 1.0, weights, kDtypeOf<T>, n};
    for_each_span([&](int64_t span, int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) {
        for (int64_t i = 0; i < n; ++i) {
          scaled.z[v * n + i] = (logits.z[v * n + i] - logits.peak[i]) * inverse;
        }
      }
      decoder_kernels<T>().exponentials(scaled, begin, end, &tempered_[span * n], nullptr);
    });
  }

  // Tells whether the row is no distribution, since its largest logit is infinite or NaN: then its
  // token is the argmax, even if one should be drawn.
  template <typename Rows>
  bool took_first(const Logits<T>& logits, const Rows& rows, int64_t i) const {
    if (!std::isnan(rows.total[i])) return false;
    const Token<T> first = largest_of(logits, i, 1, rows.total[i])[0];
    rows.peak[i] = first.logit;
    rows.tokens[i] = first.token;
    return true;
  }

  // The largest logits, largest first. Only spans whose largest logit is among the `size` largest
  // of all spans can have one of them; any span can if there is a NaN, which `total` shows.
  std::vector<Token<T>> largest_of(const Logits<T>& logits, int64_t column, int64_t size,
                                   T total) const {
    const int64_t n = logits.columns;
    T least = -std::numeric_limits<T>::infinity();
    if (size < spans_ && !std::isnan(total)) {
      std::vector<T> bounds(spans_);
      for (int64_t span = 0; span < spans_; ++span) bounds[span] = peaks_[span * n + column];
      std::nth_element(bounds.begin(), bounds.begin() + size - 1, bounds.end(), std::greater<T>());
      least = bounds[size - 1];
    }
    std::vector<Token<T>> found;
    for (int64_t span = 0; span < spans_; ++span) {
      if (peaks_[span * n + column] < least) continue;
      const int64_t end = std::min((span + 1) * kSpan, product_.rows);
      for (int64_t v = span * kSpan; v < end; ++v) {
        const T logit = logits.z[v * n + column];
        if (!(logit < least)) found.push_back({logit, v});
      }
    }
    std::partial_sort(found.begin(), found.begin() + size, found.end(), before<T>);
    found.resize(size);
    return found;
  }

  template <typename F>
  void for_each_row(int64_t rows, const F& f) const {
    team_.share(rows, 1, [&](int64_t i, int64_t, int64_t) { f(i); });
  }

  // Calls f(span, begin, end) for every kSpan rows of the weight.
  template <typename F>
  void for_each_span(const F& f) const {
    team_.share(product_.rows, kSpan,
                [&](int64_t begin, int64_t end, int64_t) { f(begin / kSpan, begin, end); });
  }

  double column_sum(const Buffer<T>& partial, int64_t n, int64_t column) const {
    double sum = 0.0;
    for (int64_t span = 0; span < spans_; ++span) sum += partial[span * n + column];
    return sum;
  }

  // Draws by inversion: the first token at which the running sum of the tempered exponentials
  // exceeds `uniform` times the whole sum.
  int64_t sample(const Logits<T>& logits, int64_t column, double uniform,
                 const Buffer<T>& partial) const {
    const int64_t n = logits.columns;
    const double threshold = uniform * column_sum(partial, n, column);
    double sum = 0.0;
    double before = 0.0;  // of the span chosen
    int64_t chosen = 0;
    for (int64_t span = 0; span < spans_ && sum <= threshold; ++span) {
      if (!(partial[span * n + column] > 0)) continue;
      chosen = span;
      before = sum;
      sum += partial[span * n + column];
    }
    return decoder_kernels<T>().pick(logits, column, chosen * kSpan,
                                     std::min((chosen + 1) * kSpan, product_.rows),
                                     threshold - before);
  }

  void erase(void* exps, int64_t at) const {
    with_type(exps_dtype_, [&](auto type) { static_cast<decltype(type)*>(exps)[at] = 0.0f; });
  }

  Team& team_;
  int64_t logit_rows_;
  Skinny<T> product_;
  double inverse_temperature_;
  Dtype exps_dtype_;
  int64_t exps_stride_;
  Tensor logits_;  // a tensor, so that memory profiles show it
  int64_t spans_;
  Buffer<T> sums_, tempered_, peaks_;  // [spans, rows]
  Buffer<int64_t> at_;
  std::optional<Tensor> weights_;  // [V, rows]
};

// The number of threads that the spans of a weight [V, H] keep busy.
inline int64_t most_threads(const Tensor& weight) { return (weight.size(0) / kSpan + 1) / 2; }

// Rows [first, first + count) of hidden [M, H] as columns [H, padded(count)].
template <typename T>
void to_columns(const Tensor& hidden, int64_t first, int64_t count, T* columns) {
  const int64_t depth = hidden.size(1);
  const int64_t width = padded(count);
  const T* h = elements<T>(hidden) + first * depth;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < depth; ++k) columns[k * width + i] = h[i * depth + k];
  }
  for (int64_t k = 0; k < depth; ++k) std::fill_n(columns + k * width + count, width - count, T(0));
}

// Calls f(first, count, columns) for every `piece` rows of hidden [M, H].
template <typename T, typename F>
void for_each_piece(const Tensor& hidden, int64_t piece, const F& f) {
  const Buffer<T> columns(hidden.size(1) * padded(piece));
  for (int64_t first = 0; first < hidden.size(0); first += piece) {
    const int64_t count = std::min(piece, hidden.size(0) - first);
    to_columns(hidden, first, count, columns.get());
    f(first, count, columns.get());
  }
}

// The largest number of rows whose logits exist at once, even if the caller's bound is larger.
constexpr int64_t kMaxLogitRows = 32;

// exps [rows, V] as the head writes it: transposed, rows next to each other. Null: not wanted.
struct Workspace {
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat;
  int64_t stride = 0;
  int64_t rows = 0;

  explicit Workspace(const std::optional<Tensor>& exps) {
    if (!exps) return;
    require(exps->dim() == 2 && exps->stride(0) == 1);
    dtype = float_dtype(*exps);
    require(dtype != Dtype::kHalf);
    data = exps->mutable_data_ptr();
    stride = exps->stride(1);
    rows = exps->size(0);
  }

  void* row(int64_t index) const {
    const int64_t size = dtype == Dtype::kBFloat16 ? 2 : dtype == Dtype::kFloat ? 4 : 8;
    return data == nullptr ? nullptr : static_cast<char*>(data) + index * size;
  }
};

}  // namespace accumext::cpu
