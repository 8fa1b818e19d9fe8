// The rows of the embedding that a call reads.
#pragma once

#include "common/decode_call.h"
#include "cpu/decoder/skinny_matmul.h"

namespace accumext::cpu {

template <typename T>
class LookUp {
 public:
  explicit LookUp(const DecodeCall& call)
      : width(call.table.size(1)),
        tokens_(integers(call.inputs)),
        mask_(call.of_inputs.mask ? booleans(*call.of_inputs.mask) : nullptr),
        scale_(static_cast<T>(call.of_inputs.scale)),
        words_(call.table.size(0)),
        table_(static_cast<const char*>(call.table.const_data_ptr())),
        dtype_(float_dtype(call.table)),
        row_bytes_(call.table.stride(0) * size_of(dtype_)) {
    require(call.table.stride(1) == 1 || width <= 1);
    require(mask_ == nullptr || call.of_inputs.mask->numel() == call.inputs.numel() * width);
  }

  // Row `row` of all steps' [T B, width], with units dropped.
  void read(int64_t row, T* to) const {
    require(0 <= tokens_[row] && tokens_[row] < words_);
    decoder_kernels<T>().read(dtype_, table_ + tokens_[row] * row_bytes_, width, to);
    if (mask_ == nullptr) return;
    const bool* mask = mask_ + row * width;
    for (int64_t k = 0; k < width; ++k) to[k] = mask[k] ? to[k] * scale_ : T(0);
  }

  const int64_t width;

 private:
  const int64_t* tokens_;  // [T, B]
  const bool* mask_;       // [T, B, width] or null
  T scale_;
  int64_t words_;
  const char* table_;
  Dtype dtype_;
  int64_t row_bytes_;
};

}  // namespace accumext::cpu
