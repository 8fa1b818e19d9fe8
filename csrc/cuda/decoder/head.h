// The output layer on a GPU: logits of a few rows at a time, and what follows from them.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "cuda/decoder/matmul.h"
#include "cuda/decoder/matrix_arguments.h"
#include "cuda/decoder/softmax_stats.cuh"
#include "cuda/enqueue.h"

namespace accumext::cuda {

// The kernels of the softmax: head_forward.cu.
template <typename T>
void launch_softmax(const Queue& queue, const Softmax<T>& call, const Rows<T>& rows,
                    const FeedBack& feed_back);

// The words that may be drawn: the top_k most probable ones, and of these the fewest whose
// probabilities reach the share top_p.
struct TokenFilter {
  int64_t top_k;
  double top_p;
};

// The kernels of filtered samples, of logits that lie along the rows: head_sample.cu.
template <typename T>
void launch_sample(const Queue& queue, Softmax<T> call, const Rows<T>& rows,
                   const FeedBack& feed_back, const TokenFilter& filter, double temperature);

// Products of up to `most` rows with the weight of a head.
template <typename T>
class LogitsProduct {
 public:
  // Logits lie along the rows, or else, as exponentials do, along the columns.
  LogitsProduct(const Queue& queue, const Views& views,
                const Tensor& weight,               // [V, H]
                const std::optional<Tensor>& bias,  // [V]
                int64_t most, bool along_rows = false)
      : weight_(weight),
        along_rows_(along_rows),
        stride_(along_rows ? (weight.size(0) + kWidth<T> - 1) / kWidth<T> * kWidth<T> : most),
        logits_(queue.empty({along_rows ? most : weight.size(0), stride_}, dtype_of<T>())) {
    require(weight.dim() == 2 && weight.size(0) > 0 && most > 0);
    require(multiplies<T>(float_dtype(weight)));
    views.operand(weight, weight.size(0), weight.size(1));
    bias_ = views.column<const T>(bias, weight.size(0));
  }

  int64_t vocabulary() const { return weight_.size(0); }
  int64_t depth() const { return weight_.size(1); }

  // The logits of rows [first, first + count) of hidden, [M, H] in the weight's dtype. `others`:
  // matrices that the same kernel reads or writes. Overwrites the logits of the call before.
  Logits<T> of(Tensor hidden, int64_t first, int64_t count, const AnyMatrix& others) {
    const Tensor some = torch::stable::narrow(hidden, 0, first, count);
    Matrix<const T> view{static_cast<const T*>(logits_.data_ptr()), 1, stride_};
    if (along_rows_) {
      Tensor logits = logits_;
      logits = torch::stable::narrow(logits, 0, 0, count);
      logits = torch::stable::narrow(logits, 1, 0, vocabulary());
      matmul(some, torch::stable::transpose(weight_, 0, 1), logits);
      std::swap(view.row_stride, view.column_stride);
    } else {
      matmul(weight_, torch::stable::transpose(some, 0, 1),
             torch::stable::narrow(logits_, 1, 0, count));
    }
    return {view, bias_, tiles_of(count, vocabulary(), view, others)};
  }

 private:
  Tensor weight_;
  bool along_rows_;
  int64_t stride_;  // of logits_; along rows a multiple of a vector
  Tensor logits_;   // [most, V] or [V, most]
  Column<const T> bias_;
};

// hidden, [M, H], in the dtype of the weight that it is multiplied with.
inline Tensor rounded_like(const Queue& queue, const Tensor& hidden, const Tensor& weight) {
  if (float_dtype(weight) == float_dtype(hidden)) return hidden;
  Tensor operand = queue.empty({hidden.size(0), hidden.size(1)}, weight.scalar_type());
  torch::stable::copy_(operand, hidden);
  return operand;
}

// A product and two launches for up to `most` rows; three launches if tokens are their own targets
// and exponentials are wanted.
template <typename T>
class Head {
 public:
  Head(const Queue& queue, const Views& views,
       const Tensor& weight,               // [V, H]
       const std::optional<Tensor>& bias,  // [V]
       int64_t most, bool sampled, double temperature,
       const std::optional<TokenFilter>& filter = {})
      : queue_(queue),
        product_(queue, views, weight, bias, most, filter.has_value()),
        most_(most),
        tempered_(sampled && temperature != 1.0),
        temperature_(temperature),
        filter_(filter) {
    require(temperature > 0.0);
    call_.inverse_temperature = inverse_of<T>(temperature);
  }

  int64_t vocabulary() const { return product_.vocabulary(); }
  int64_t depth() const { return product_.depth(); }

  // Evaluates the rows of hidden, [M, H] in the weight's dtype; feed_back begins at the first one.
  void evaluate(const Tensor& hidden, const Rows<T>& rows, FeedBack feed_back = {}) {
    for (int64_t first = 0; first < hidden.size(0); first += most_) {
      const int64_t count = std::min(most_, hidden.size(0) - first);
      static_cast<Logits<T>&>(call_) = product_.of(hidden, first, count, rows.exps);
      piece(rows.from(first), feed_back.from(first));
    }
  }

 private:
  void piece(const Rows<T>& rows, const FeedBack& feed_back) {
    if (filter_) return launch_sample(queue_, call_, rows, feed_back, *filter_, temperature_);
    const int64_t bytes = softmax_workspace(call_, tempered_, nullptr);
    if (!memory_ || memory_->numel() < bytes) {
      memory_ = queue_.empty({bytes}, torch::headeronly::ScalarType::Byte);
    }
    softmax_workspace(call_, tempered_, static_cast<std::byte*>(memory_->data_ptr()));
    launch_softmax(queue_, call_, rows, feed_back);
  }

  const Queue& queue_;
  LogitsProduct<T> product_;
  int64_t most_;
  bool tempered_;
  double temperature_;
  std::optional<TokenFilter> filter_;
  std::optional<Tensor> memory_;
  Softmax<T> call_{};
};

}  // namespace accumext::cuda
