// add_rows: rows of one matrix, times factors, to rows of another.
#include <algorithm>

#include "common/arguments.h"
#include "cpu/decoder/skinny_matmul.h"
#include "cpu/simd/types.h"
#include "cpu/team.h"

namespace accumext::cpu {
namespace {

// Elements of a piece. Few are added on one thread, which takes less time than to wake another.
constexpr int64_t kElements = 1 << 18;

// The arguments of the operator; accumext/decoder/_operators.py says what each is.
template <typename T>
struct Call {
  T* sums;
  int64_t sums_stride;
  const int64_t *to, *from;  // null: the rows in their order
  const T* factor;           // null: 1
  int64_t count;
};

// Columns [begin, end) of all rows, one row after the other: a row of the sums may be named twice.
template <typename T, typename Row>
void add(const Call<T>& call, const Row* rows, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < call.count; ++i) {
    T* to = call.sums + (call.to != nullptr ? call.to[i] : i) * call.sums_stride;
    const Row* from = rows + (call.from != nullptr ? call.from[i] : i) * stride;
    const T factor = call.factor != nullptr ? call.factor[i] : T(1);
    for (int64_t k = begin; k < end; ++k) to[k] += factor * static_cast<T>(from[k]);
  }
}

template <typename T>
void add_rows(const Tensor& sums, const std::optional<Tensor>& to,
              const std::optional<Tensor>& factor, const Tensor& rows,
              const std::optional<Tensor>& from) {
  const auto& named = from ? from : to;
  const int64_t count = named ? named->numel() : rows.size(0);
  const Call<T> call{
      static_cast<T*>(sums.mutable_data_ptr()), sums.stride(0),      to ? integers(*to) : nullptr,
      from ? integers(*from) : nullptr,         elements<T>(factor), count};
  require(count == (to ? to->numel() : sums.size(0)));
  require(count == (from ? from->numel() : rows.size(0)));
  require(!factor || factor->numel() == count);
  const auto within = [&](const int64_t* index, int64_t size) {
    return index == nullptr ||
           std::all_of(index, index + count, [&](int64_t i) { return 0 <= i && i < size; });
  };
  require(within(call.to, sums.size(0)) && within(call.from, rows.size(0)));
  const int64_t columns =
      std::max<int64_t>(kTile, kElements / std::max<int64_t>(1, count) / kTile * kTile);
  Team::once(sums.size(1), columns, [&](int64_t begin, int64_t end, int64_t) {
    with_type(float_dtype(rows), [&](auto type) {
      using Row = decltype(type);
      add<T>(call, static_cast<const Row*>(rows.const_data_ptr()), rows.stride(0), begin, end);
    });
  });
}

void add_rows_cpu(Tensor sums, std::optional<Tensor> to, std::optional<Tensor> factor, Tensor rows,
                  std::optional<Tensor> from) {
  require(sums.dim() == 2 && rows.dim() == 2 && sums.size(1) == rows.size(1));
  require(sums.size(1) <= 1 || (sums.stride(1) == 1 && rows.stride(1) == 1));
  if (sums.numel() == 0 || rows.numel() == 0) return;
  if (float_dtype(sums) == Dtype::kDouble) return add_rows<double>(sums, to, factor, rows, from);
  require(float_dtype(sums) == Dtype::kFloat);
  add_rows<float>(sums, to, factor, rows, from);
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("add_rows", accumext::boxed<accumext::cpu::add_rows_cpu>);
}
