// add_matmul: large products with sums in the accumulation dtype, for operands of any dtype. On
// processors with AVX-512 the library's product of bfloat16 operands rounds its sums, and on some
// its product of floats reaches half of the processor's speed.
#include <algorithm>
#include <optional>

#include "cpu/decoder/packed_matmul.h"
#include "cpu/simd/isa.h"

namespace accumext::cpu {
namespace {

// Rows of the left operand that are packed at once lie in the second cache; a piece of a job has as
// many or fewer, so that each thread has some pieces. Pairs are multiplied so fast that the second
// cache has to hold the rows' sums, too.
constexpr int64_t kMostRows = 240;
constexpr int64_t kLeastRows = 24;
constexpr int64_t kMostPairedRows = 4 * kTile;
constexpr int64_t kLeastPairedRows = 2 * kTile;
constexpr int64_t kPieces = 4;  // of a thread

// Panels of a group, at least, where threads have groups of their own: each thread packs the rows
// again for its group.
constexpr int64_t kOwnPanels = 8;

// Bytes of panels that are packed at once, for all threads: half of a second cache. If all panels
// take no more than twice as much, they are packed at once, and the sums go to memory once.
constexpr int64_t kPackedBytes = 1 << 20;

// A product of so few columns and so many rows is bound by reading the left operand.
constexpr int64_t kFewColumns = 32;
constexpr int64_t kManyRows = 2 * kSpan;

// A matrix of the call, with any strides.
struct Operand {
  const char* data;
  Dtype dtype;
  int64_t row_stride, column_stride;  // elements

  explicit Operand(const Tensor& tensor)
      : data(static_cast<const char*>(tensor.const_data_ptr())),
        dtype(float_dtype(tensor)),
        row_stride(tensor.stride(0)),
        column_stride(tensor.stride(1)) {}

  const char* at(int64_t row, int64_t column) const {
    return data + (row * row_stride + column * column_stride) * size_of(dtype);
  }
};

template <typename T>
class Matmul {
 public:
  Matmul(const Tensor& sums, const Tensor& left, const Tensor& right, bool overwrite)
      : rows_(left.size(0)),
        depth_(left.size(1)),
        columns_(right.size(1)),
        left_(left),
        right_(right),
        out_(static_cast<T*>(sums.mutable_data_ptr())),
        out_stride_(sums.stride(0)),
        overwrite_(overwrite) {
    if (left_.dtype == Dtype::kBFloat16) paired_ = paired_kernels();
    depth_block_ = panel_terms<T>(depth_, paired_ != nullptr);
    panel_size_ = panel_size<T>(depth_block_, paired_ != nullptr);
    const int64_t least = paired_ != nullptr ? kLeastPairedRows : kLeastRows;
    const int64_t most = paired_ != nullptr ? kMostPairedRows : kMostRows;
    row_span_ = std::min(most, rows_ / (kPieces * threads_) + least) / least * least;
    spans_ = (rows_ + row_span_ - 1) / row_span_;
  }

  void run() const {
    const int64_t panels = (columns_ + kPanelColumns<T> - 1) / kPanelColumns<T>;
    const int64_t blocks = (depth_ + depth_block_ - 1) / depth_block_;
    const int64_t bytes = panel_size_ * static_cast<int64_t>(sizeof(T));
    const bool once = panels * blocks * bytes <= 2 * kPackedBytes;
    const int64_t fit = once ? panels * blocks : std::max<int64_t>(1, kPackedBytes / bytes);
    const int64_t wide = std::min(panels, fit);
    const int64_t deep = std::clamp<int64_t>(fit / panels, 1, blocks);
    const int64_t groups = groups_of(wide);
    const int64_t group = (wide + groups - 1) / groups;  // panels of a piece
    Team::gather(spans_ * groups, [&](Team& team) {
      const Buffer<T> packed(wide * deep * panel_size_);
      const Buffer<T> scratch(team.threads() * row_span_ * depth_block_);
      for (int64_t panel = 0; panel < panels; panel += wide) {
        for (int64_t block = 0; block < blocks; block += deep) {
          const Part part{panel, std::min(wide, panels - panel), block,
                          std::min(deep, blocks - block), packed.get()};
          pack(team, part);
          multiply(team, part, group, scratch.get());
        }
      }
    });
  }

 private:
  // The number of groups of panels. Each thread has its own part of the larger operand: rows, or
  // the panels that it has packed and its cache holds.
  int64_t groups_of(int64_t panels) const {
    const int64_t own = rows_ > columns_ ? 1 : std::min(threads_, panels / kOwnPanels);
    return std::clamp<int64_t>(std::max(own, kPieces * threads_ / spans_), 1, panels);
  }

  // Panels of some blocks of terms, packed block by block.
  struct Part {
    int64_t panel, panels, block, blocks;
    T* packed;
  };

  void pack(Team& team, const Part& part) const {
    constexpr int64_t kGroup = 4;  // neighbouring panels share cache lines of the operand
    const int64_t groups = (part.panels + kGroup - 1) / kGroup;
    team.share(part.blocks * groups, 1, [&](int64_t i, int64_t, int64_t) {
      const int64_t block = i % part.blocks;
      const int64_t first = i / part.blocks * kGroup;
      const int64_t last = std::min(first + kGroup, part.panels);
      pack(part.block + block, part.panel + first, part.panel + last,
           part.packed + (block * part.panels + first) * panel_size_);
    });
  }

  // All rows times these panels.
  void multiply(Team& team, const Part& part, int64_t group, T* scratch) const {
    const int64_t groups = (part.panels + group - 1) / group;
    team.share(spans_ * groups, 1, [&](int64_t i, int64_t, int64_t thread) {
      const int64_t first = i / spans_ * group, last = std::min(first + group, part.panels);
      const int64_t row = i % spans_ * row_span_;
      T* packed_rows = scratch + thread * row_span_ * depth_block_;
      for (int64_t block = 0; block < part.blocks; ++block) {
        Block<T> b = left_block(row, part.block + block, packed_rows);
        for (int64_t panel = first; panel < last; ++panel) {
          const int64_t column = (part.panel + panel) * kPanelColumns<T>;
          b.panel = part.packed + (block * part.panels + panel) * panel_size_;
          b.columns = std::min(kPanelColumns<T>, columns_ - column);
          b.out = out_ + row * out_stride_ + column;
          multiply(b);
        }
      }
    });
  }

  // Terms of a block.
  int64_t depth_of(int64_t block) const {
    return std::min(depth_block_, depth_ - block * depth_block_);
  }

  void pack(int64_t block, int64_t first, int64_t last, T* to) const {
    const int64_t column = first * kPanelColumns<T>;
    const PanelSource source{.data = right_.at(block * depth_block_, column),
                             .dtype = right_.dtype,
                             .depth = depth_of(block),
                             .columns = std::min(last * kPanelColumns<T>, columns_) - column,
                             .depth_stride = right_.row_stride,
                             .column_stride = right_.column_stride,
                             .panel_size = panel_size_};
    if constexpr (std::is_same_v<T, float>) {
      if (paired_ != nullptr) return paired_->pack(source, reinterpret_cast<uint32_t*>(to));
    }
    decoder_kernels<T>().pack(source, to);
  }

  // A block with its part of the left operand, in `scratch` unless it is read where it lies.
  Block<T> left_block(int64_t row, int64_t at, T* scratch) const {
    Block<T> block{};
    block.rows = std::min(row_span_, rows_ - row);
    block.depth = depth_of(at);
    block.out_stride = out_stride_;
    block.add = at > 0 || !overwrite_;
    block.left = scratch;
    const char* left = left_.at(row, at * depth_block_);
    if (paired_ == nullptr) {
      decoder_kernels<T>().pack_rows({.data = left,
                                      .dtype = left_.dtype,
                                      .rows = block.rows,
                                      .depth = block.depth,
                                      .row_stride = left_.row_stride,
                                      .depth_stride = left_.column_stride},
                                     scratch);
    } else if (left_.column_stride == 1) {
      block.left = left;
      block.row_stride = left_.row_stride;
    } else {  // pairs have to be next to each other
      block.row_stride = up_to(2 * kTile, block.depth);
      paired_->transpose(reinterpret_cast<const uint16_t*>(left), left_.column_stride, block.depth,
                         block.rows, reinterpret_cast<uint16_t*>(scratch), block.row_stride);
    }
    return block;
  }

  void multiply(const Block<T>& block) const {
    if constexpr (std::is_same_v<T, float>) {
      if (paired_ != nullptr) return paired_->multiply(block);
    }
    decoder_kernels<T>().multiply(block);
  }

  int64_t rows_, depth_, columns_;
  Operand left_, right_;
  T* out_;
  int64_t out_stride_;
  bool overwrite_;
  int64_t threads_ = torch::stable::get_num_threads();
  const PairedKernels* paired_ = nullptr;  // null: operands are T in the product
  int64_t depth_block_;                    // terms of a panel
  int64_t panel_size_;                     // elements
  int64_t row_span_;                       // rows of a piece
  int64_t spans_;                          // of all rows
};

// out = left right, by the library.
void library_matmul(const Tensor& left, const Tensor& right, const Tensor& out) {
  using torch::stable::detail::from;
  StableIValue stack[] = {from(left), from(right), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // a second handle of `out`, to be released here
}

// For cases in which the library is fastest. addmm takes a Scalar, which cannot be passed here.
template <typename T>
void library_add_matmul(Tensor sums, Tensor left, const Tensor& right, bool overwrite) {
  if (overwrite) return library_matmul(left, right, sums);
  constexpr int64_t kSlice = 1024;  // rows
  const int64_t columns = sums.size(1);
  Tensor product = torch::stable::new_empty(sums, {std::min(kSlice, sums.size(0)), columns});
  for (int64_t row = 0; row < sums.size(0); row += kSlice) {
    const int64_t rows = std::min(kSlice, sums.size(0) - row);
    library_matmul(torch::stable::narrow(left, 0, row, rows), right,
                   torch::stable::narrow(product, 0, 0, rows));
    const T* from = static_cast<const T*>(product.const_data_ptr());
    T* to = static_cast<T*>(sums.mutable_data_ptr()) + row * sums.stride(0);
    for (int64_t r = 0; r < rows; ++r, from += columns, to += sums.stride(0)) {
      for (int64_t c = 0; c < columns; ++c) to[c] += from[c];
    }
  }
}

}  // namespace

Tensor converted(const Tensor& tensor, Dtype dtype) {
  if (float_dtype(tensor) == dtype) return tensor;
  using torch::headeronly::ScalarType;
  const ScalarType types[] = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float,
                              ScalarType::Double};
  return torch::stable::to(tensor, types[static_cast<int>(dtype)]);
}

// Few columns: the product that reads each row of the left operand once.
template <typename T>
void skinny_matmul(const Tensor& sums, const Tensor& left, const Tensor& right, bool overwrite) {
  const int64_t count = right.size(1);
  const int64_t width = padded(count);
  const T* from = static_cast<const T*>(right.const_data_ptr());
  const Buffer<T> columns(right.size(0) * width);
  for (int64_t k = 0; k < right.size(0); ++k) {
    T* to = &columns[k * width];
    for (int64_t i = 0; i < count; ++i) to[i] = from[k * right.stride(0) + i * right.stride(1)];
    std::fill(to + count, to + width, T(0));
  }
  Skinny<T> product(left, nullptr, count);
  product.take(columns.get(), width, count);
  T* out = static_cast<T*>(sums.mutable_data_ptr());
  const int64_t stride = sums.stride(0);
  std::optional<Buffer<T>> found;  // [rows, count], to add
  if (!overwrite) found.emplace(sums.size(0) * count);
  Team::once(sums.size(0), kSpan, [&](int64_t begin, int64_t end, int64_t) {
    if (!found) return product.run(begin, end, out, stride);
    product.run(begin, end, found->get(), count);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < count; ++i) out[row * stride + i] += (*found)[row * count + i];
    }
  });
}

template <typename T>
void add_matmul(const Tensor& sums, Tensor left, Tensor right, bool overwrite) {
  const Dtype dtype = float_dtype(left);
  const bool few = right.size(1) <= kFewColumns && left.size(0) >= kManyRows;
  if (few && left.stride(1) == 1 && float_dtype(right) == kDtypeOf<T>) {
    return skinny_matmul<T>(sums, left, right, overwrite);
  }
  const bool pairs = dtype == Dtype::kBFloat16 && paired_kernels() != nullptr;
  if (dtype != kDtypeOf<T> && !pairs) right = converted(right, dtype);
  if (widest_isa() == Isa::kPortable) {
    left = converted(left, kDtypeOf<T>);
    return library_add_matmul<T>(sums, left, converted(right, kDtypeOf<T>), overwrite);
  }
  if (pairs && left.stride(0) != 1 && left.stride(1) != 1) left = torch::stable::contiguous(left);
  Matmul<T>(sums, left, right, overwrite).run();
}

template void add_matmul<float>(const Tensor&, Tensor, Tensor, bool);
template void add_matmul<double>(const Tensor&, Tensor, Tensor, bool);

namespace {

void add_matmul_cpu(Tensor sums, Tensor left, Tensor right, bool overwrite) {
  require(sums.dim() == 2 && left.dim() == 2 && right.dim() == 2);
  require(left.size(0) == sums.size(0) && right.size(1) == sums.size(1));
  require(left.size(1) == right.size(0));
  require(sums.stride(1) == 1 || sums.size(1) <= 1);
  if (sums.numel() == 0) return;
  if (left.size(1) == 0) {
    if (overwrite) torch::stable::zero_(sums);
    return;
  }
  if (float_dtype(sums) == Dtype::kDouble) return add_matmul<double>(sums, left, right, overwrite);
  require(float_dtype(sums) == Dtype::kFloat);
  add_matmul<float>(sums, left, right, overwrite);
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("add_matmul", accumext::boxed<accumext::cpu::add_matmul_cpu>);
}
