// A call of window_factors, as both devices take it:
//
//   window_factors(Tensor(a!) numbers, Tensor(b!) flags, Tensor[] main_grads, Tensor?[] ledger,
//                  float base_weight, float? max_norm, bool normalised, bool checks_norm) -> ()
#pragma once

#include <optional>
#include <vector>

#include "common/arguments.h"
#include "math/window_factors.h"

namespace accumext {

// The schema's `ledger`: numbers of a window that tensors hold, in the order of Entry.
// `reference.window_factors` says what each is, and what it is if no tensor holds it.
class WindowLedger {
 public:
  enum Entry { kNorm, kOverflow, kBaseWeight, kWeight, kScale, kFoundInf, kCounted, kEntries };

  explicit WindowLedger(const std::vector<std::optional<Tensor>>& tensors) : tensors_(tensors) {
    require(tensors_.size() == kEntries);
  }

  bool has(Entry entry) const { return tensors_[entry].has_value(); }

  // The number, or another one if no tensor holds it.
  Scalar number(Arguments& arguments, Entry entry, double otherwise) const {
    return has(entry) ? arguments.scalar(tensors_[entry]) : Scalar{.value = otherwise};
  }

  WindowNumbers<Scalar> numbers(Arguments& arguments, double base_weight) const {
    return {.base_weight = number(arguments, kBaseWeight, base_weight),
            .weight = number(arguments, kWeight, 1.0),
            .scale = number(arguments, kScale, 1.0),
            .overflow = number(arguments, kOverflow, 0.0),
            .found_inf = number(arguments, kFoundInf, 0.0),
            .counted = number(arguments, kCounted, 1.0)};
  }

  WindowRules rules(std::optional<double> max_norm, bool normalised, bool checks_norm) const {
    return {.max_norm = max_norm.value_or(0.0),
            .clips = max_norm.has_value(),
            .weighted = has(kWeight),
            .counted = has(kCounted),
            .normalised = normalised,
            .checks_norm = checks_norm};
  }

 private:
  const std::vector<std::optional<Tensor>>& tensors_;
};

// The memory of the three numbers in a result.
template <typename T>
T* three(Arguments& arguments, const Tensor& tensor, Dtype dtype) {
  require(arguments.dense_float(tensor) == dtype);
  require(tensor.dim() == 1 && tensor.size(0) == 3 && tensor.is_contiguous());
  return static_cast<T*>(tensor.data_ptr());
}

}  // namespace accumext
