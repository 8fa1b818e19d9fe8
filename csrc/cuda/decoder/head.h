// The output layer on a GPU: logits of a few rows at a time, and what follows from them.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/decoder/matmul.h"
#include "cuda/decoder/matrix_arguments.h"
#include "cuda/decoder/softmax_stats.cuh"
#include "cuda/enqueue.h"

namespace accumext::cuda {

// The kernels of the softmax: head_forward.cu.
template <typename T>
void launch_softmax(const Queue& queue, const Softmax<T>& call, const Rows<T>& rows,
                    const FeedBack& feed_back);

// A product and two launches for up to `most` rows, three where tokens are their own targets.
template <typename T>
class Head {
 public:
  Head(const Queue& queue, const Views& views,
       const Tensor& weight,               // [V, H]
       const std::optional<Tensor>& bias,  // [V]
       int64_t most, bool sampled, double temperature)
      : queue_(queue),
        weight_(weight),
        most_(most),
        logits_(queue.empty({weight.size(0), most}, dtype_of<T>())),
        tempered_(sampled && temperature != 1.0) {
    require(weight.dim() == 2 && weight.size(0) > 0 && most > 0 && temperature > 0.0);
    require(multiplies<T>(float_dtype(weight)));
    views.operand(weight, weight.size(0), weight.size(1));
    call_.bias = views.column<const T>(bias, weight.size(0));
    call_.inverse_temperature = inverse_of<T>(temperature);
  }

  int64_t vocabulary() const { return weight_.size(0); }
  int64_t depth() const { return weight_.size(1); }

  // Rows of hidden, [M, H] in the weight's dtype; what feed_back says begins at the first of them.
  void evaluate(Tensor hidden, const Rows<T>& rows, FeedBack feed_back = {}) {
    for (int64_t first = 0; first < hidden.size(0); first += most_) {
      const int64_t count = std::min(most_, hidden.size(0) - first);
      piece(torch::stable::narrow(hidden, 0, first, count), rows.from(first),
            feed_back.from(first));
    }
  }

 private:
  void piece(const Tensor& hidden, const Rows<T>& rows, const FeedBack& feed_back) {
    const int64_t count = hidden.size(0);
    const Tensor logits = torch::stable::narrow(logits_, 1, 0, count);
    matmul(weight_, torch::stable::transpose(hidden, 0, 1), logits);
    call_.logits = {static_cast<const T*>(logits.data_ptr()), 1, most_};
    call_.tiles = tiles_of(count, vocabulary(), call_.logits, rows.exps);
    const int64_t bytes = softmax_workspace(call_, tempered_, nullptr);
    if (!memory_ || memory_->numel() < bytes) {
      memory_ = queue_.empty({bytes}, torch::headeronly::ScalarType::Byte);
    }
    softmax_workspace(call_, tempered_, static_cast<std::byte*>(memory_->data_ptr()));
    launch_softmax(queue_, call_, rows, feed_back);
  }

  const Queue& queue_;
  Tensor weight_;
  int64_t most_;
  Tensor logits_;  // [V, most]: rows next to each other, as the exponentials are
  bool tempered_;
  std::optional<Tensor> memory_;
  Softmax<T> call_{};
};

}  // namespace accumext::cuda
