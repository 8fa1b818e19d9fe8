// Samples of the most probable tokens of a row.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace accumext::cpu {

template <typename T>
struct Token {
  T logit;
  int64_t token;
};

// Larger logits come first, NaN before all as in torch; equal ones in the order of the vocabulary.
template <typename T>
bool before(const Token<T>& a, const Token<T>& b) {
  const bool no_number = std::isnan(a.logit);
  if (no_number != std::isnan(b.logit)) return no_number;
  return a.logit > b.logit || (!(a.logit < b.logit) && a.token < b.token);
}

// Samples from the fewest of these tokens, largest first, whose share of all reaches `top_p`. It
// draws by inversion, in the order of the vocabulary.
template <typename T>
int64_t sample_of(std::vector<Token<T>>& tokens, double inverse_temperature, double top_p,
                  double uniform) {
  const double peak = tokens[0].logit;
  const auto weight = [&](const Token<T>& token) {
    return std::exp((static_cast<double>(token.logit) - peak) * inverse_temperature);
  };
  double whole = 0.0;
  for (const Token<T>& token : tokens) whole += weight(token);
  double kept = 0.0;
  size_t count = 0;
  while (count < tokens.size() && (count == 0 || kept < top_p * whole)) {
    kept += weight(tokens[count++]);
  }
  std::sort(tokens.begin(), tokens.begin() + count,
            [](const Token<T>& a, const Token<T>& b) { return a.token < b.token; });
  double sum = 0.0;
  int64_t possible = tokens[0].token;
  for (size_t i = 0; i < count; ++i) {
    const double e = weight(tokens[i]);
    sum += e;
    if (e > 0) possible = tokens[i].token;
    if (sum > uniform * kept) break;
  }
  return possible;
}

// Selects the tokens to keep by a histogram of the weights of a row, without sorting.
template <typename T>
class TopPFilter {
 public:
  // A column of weights in [0, 1].
  TopPFilter(const T* weights, int64_t stride, int64_t size)
      : weights_(size), sums_(kBins), kept_(0.0) {
    for (int64_t v = 0; v < size; ++v) {
      const T weight = weights[v * stride];
      weights_[v] = weight;
      sums_[bin(weight)] += weight;
    }
  }

  // Keeps the fewest tokens of the largest logits whose share reaches `top_p`; others weigh 0.
  void keep(double top_p, const T* logits, int64_t stride) {
    double whole = 0.0;
    for (const double sum : sums_) whole += sum;
    int64_t last = kBins - 1;  // some tokens of this bin are kept, and all of the bins above
    while (last > 0 && kept_ + sums_[last] < top_p * whole) kept_ += sums_[last--];
    std::vector<Token<T>> some;
    for (size_t v = 0; v < weights_.size(); ++v) {
      const int64_t at = bin(weights_[v]);
      if (at == last) some.push_back({logits[v * stride], static_cast<int64_t>(v)});
      if (at < last) weights_[v] = T(0);
    }
    std::sort(some.begin(), some.end(), before<T>);
    for (const Token<T>& token : some) {
      T& weight = weights_[token.token];
      if (kept_ > 0 && kept_ >= top_p * whole) {
        weight = T(0);
      } else {
        kept_ += weight;
      }
    }
  }

  // Draws by inversion, in the order of the vocabulary.
  int64_t sample(double uniform) const {
    double sum = 0.0;
    int64_t possible = 0;
    for (size_t v = 0; v < weights_.size(); ++v) {
      if (!(weights_[v] > 0)) continue;
      sum += weights_[v];
      possible = static_cast<int64_t>(v);
      if (sum > uniform * kept_) break;
    }
    return possible;
  }

 private:
  // Leading bits of a weight as a float: an exponent and six bits more, in the order of weights.
  static constexpr int kDropped = 17;
  static constexpr int64_t kBins = (std::bit_cast<uint32_t>(1.0f) >> kDropped) + 1;

  static int64_t bin(T weight) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(weight)) >> kDropped;
    return std::min<int64_t>(bits, kBins - 1);  // NaN
  }

  std::vector<T> weights_;
  std::vector<double> sums_;  // of the weights of every bin
  double kept_;
};

}  // namespace accumext::cpu
