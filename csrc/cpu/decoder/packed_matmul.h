// A weight that many steps multiply with the few rows of a batch. It is packed once into panels, as
// the right operand of a large product is. So the rows need no other order than that of tensors,
// and no padding.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "cpu/decoder/skinny_matmul.h"
#include "cpu/team.h"

namespace accumext::cpu {

constexpr int64_t kPairedTerms = 512;

// Terms of a panel: as many as the first cache holds, or fewer, so that blocks are equal.
template <typename T>
int64_t panel_terms(int64_t depth, bool paired) {
  const int64_t most = paired ? kPairedTerms : decoder_kernels<T>().panel_terms;
  const int64_t blocks = std::max<int64_t>(1, (depth + most - 1) / most);
  return up_to(2 * kTile, (depth + blocks - 1) / blocks);
}

// Elements of a panel of so many terms. Two bfloat16 terms take the place of one float.
template <typename T>
int64_t panel_size(int64_t terms, bool paired) {
  return (paired ? terms / 2 : terms) * kPanelColumns<T>;
}

// A tensor in another dtype.
Tensor converted(const Tensor& tensor, Dtype dtype);

// sums = (0 if overwrite else sums) + left right: matmul.cpp.
template <typename T>
void add_matmul(const Tensor& sums, Tensor left, Tensor right, bool overwrite);

// The least number of multiplications of a piece.
constexpr int64_t kPieceProducts = 1 << 19;

template <typename T>
class PackedWeight {
 public:
  // weight [columns, depth], any strides.
  explicit PackedWeight(const Tensor& weight)
      : columns(weight.size(0)),
        depth(weight.size(1)),
        panels((columns + kPanelColumns<T> - 1) / kPanelColumns<T>),
        dtype_(float_dtype(weight)),
        paired_(pairs(dtype_)),
        terms_(panel_terms<T>(depth, paired_ != nullptr)),
        blocks_((depth + terms_ - 1) / terms_),
        panel_size_(panel_size<T>(terms_, paired_ != nullptr)),
        packed_(panels * blocks_ * panel_size_) {
    require((kDtypeOf<T> == Dtype::kDouble) == (dtype_ == Dtype::kDouble));
    Team::once(panels * blocks_, 1,
               [&](int64_t i, int64_t, int64_t) { pack(weight, i / blocks_, i % blocks_); });
  }

  // The rows to multiply, [count, depth].
  void take(const T* rows, int64_t count) {
    count_ = count;
    if (static_cast<int64_t>(rows_.size()) < count * depth) rows_.resize(count * depth);
    if (paired_ != nullptr) {
      auto* to = reinterpret_cast<torch::headeronly::BFloat16*>(rows_.data());
      std::transform(rows, rows + count * depth, to, [](T x) { return static_cast<float>(x); });
      return;
    }
    for (int64_t i = 0; i < blocks_; ++i) {
      const int64_t term = i * terms_;
      decoder_kernels<T>().pack_rows({.data = rows + term,
                                      .dtype = kDtypeOf<T>,
                                      .rows = count,
                                      .depth = std::min(terms_, depth - term),
                                      .row_stride = depth,
                                      .depth_stride = 1},
                                     rows_.data() + count * term);
    }
    decoder_kernels<T>().round(dtype_, rows_.data(), count * depth);
  }

  // The panels of a piece.
  int64_t grain() const {
    const int64_t products = count_ * depth * kPanelColumns<T>;
    return std::max<int64_t>(1, kPieceProducts / std::max<int64_t>(1, products));
  }

  // Columns [begin, end) times kPanelColumns of the product, to out [count, columns].
  void run(int64_t begin, int64_t end, T* out) const {
    Block<T> block{};
    block.rows = count_;
    block.row_stride = depth;
    block.out_stride = columns;
    const auto* pairs = reinterpret_cast<const uint16_t*>(rows_.data());
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t column = panel * kPanelColumns<T>;
      block.columns = std::min(kPanelColumns<T>, columns - column);
      block.out = out + column;
      for (int64_t i = 0; i < blocks_; ++i) {
        const int64_t term = i * terms_;
        block.left = paired_ != nullptr ? static_cast<const void*>(pairs + term)
                                        : rows_.data() + count_ * term;
        block.depth = std::min(terms_, depth - term);
        block.panel = at(panel, i);
        block.add = i > 0;
        multiply(block);
      }
    }
  }

  const int64_t columns;
  const int64_t depth;
  const int64_t panels;

 private:
  static const PairedKernels* pairs(Dtype dtype) {
    const bool narrow = std::is_same_v<T, float> && dtype == Dtype::kBFloat16;
    return narrow ? paired_kernels() : nullptr;
  }

  T* at(int64_t panel, int64_t block) const {
    return packed_.get() + (panel * blocks_ + block) * panel_size_;
  }

  void pack(const Tensor& weight, int64_t panel, int64_t block) const {
    const int64_t column = panel * kPanelColumns<T>;
    const int64_t term = block * terms_;
    const int64_t size = size_of(dtype_);
    const PanelSource source{.data = static_cast<const char*>(weight.const_data_ptr()) +
                                     (column * weight.stride(0) + term * weight.stride(1)) * size,
                             .dtype = dtype_,
                             .depth = std::min(terms_, depth - term),
                             .columns = std::min(kPanelColumns<T>, columns - column),
                             .depth_stride = weight.stride(1),
                             .column_stride = weight.stride(0),
                             .panel_size = 0};
    if constexpr (std::is_same_v<T, float>) {
      if (paired_ != nullptr) {
        return paired_->pack(source, reinterpret_cast<uint32_t*>(at(panel, block)));
      }
    }
    decoder_kernels<T>().pack(source, at(panel, block));
  }

  void multiply(const Block<T>& block) const {
    if constexpr (std::is_same_v<T, float>) {
      if (paired_ != nullptr) return paired_->multiply(block);
    }
    decoder_kernels<T>().multiply(block);
  }

  Dtype dtype_;
  const PairedKernels* paired_;  // null: operands are T in the product
  int64_t terms_, blocks_;       // of a panel
  int64_t panel_size_;           // elements of a block of it
  Buffer<T> packed_;             // [panels, blocks, panel_size]
  int64_t count_ = 0;
  std::vector<T> rows_;  // packed, block by block; paired: of bfloat16, as they are
};

}  // namespace accumext::cpu
