// Runs a gradient operation on the kernels of csrc/cuda, on the host. __init__.py writes a request
// to standard input: the ways to run the call, the memory of its tensors, and the call. To standard
// output goes that memory as each run has left it.
#include "request.h"
//
#include "cuda/accumulate.cuh"
#include "cuda/copy_rounded.cuh"
#include "cuda/norm.cuh"
#include "cuda/scale.cuh"
#include "cuda/tensor_list.h"
#include "cuda/window_factors.cuh"

namespace {

using namespace accumext;
using namespace accumext::cuda;
using host_cuda::Array;
using host_cuda::Memory;

// f(Norm of p)
template <typename F>
void with_norm(double p, const F& f) {
  switch (norm_kind(p)) {
    case NormKind::kAbs:
      return f(Norm<NormKind::kAbs>{p});
    case NormKind::kSquares:
      return f(Norm<NormKind::kSquares>{p});
    case NormKind::kPowers:
      return f(Norm<NormKind::kPowers>{p});
    case NormKind::kMax:
      return f(Norm<NormKind::kMax>{p});
    case NormKind::kMin:
      return f(Norm<NormKind::kMin>{p});
  }
}

// A list of tensors with its table and partial sums in device memory.
template <int kOperands>
struct Tensors {
  template <typename Operand>  // Span or Pair
  explicit Tensors(const std::vector<Operand>& operands)
      : packed(operands), memory(packed.bytes()), partials(packed.chunks()) {}

  Table<kOperands> table() const { return packed.at(memory.data()); }

  Packed<kOperands> packed;
  Memory memory;
  Array<Partial> partials;
};

class Call : public host_cuda::Run {
 public:
  using Run::Run;

  void run() {
    const int64_t op = request_.integer();
    if (op == 4) return window_factors();
    if (op == 5) return copy_rounded();
    scale_ = scalar();
    void* const norm = pointer();
    const Dtype norm_dtype = dtype();
    outcome_ = {.norm = norm, .norm_dtype = norm_dtype};
    outcome_.found_inf = static_cast<float*>(pointer());
    outcome_.max_norm = request_.number();
    outcome_.if_finite = request_.integer() != 0;
    const bool overwrite = request_.integer() != 0;
    const double p = request_.number();
    switch (op) {
      case 0:
        return with_norm(p, [&](auto norm) { find_norm(Tensors<1>(spans()), norm); });
      case 1:
        return accumulate(Tensors<2>(pairs()), overwrite);
      case 2:
        return with_norm(p, [&](auto norm) { clip(Tensors<2>(pairs()), norm, overwrite); });
      default:
        return scale(Tensors<1>(spans()));
    }
  }

 private:
  Scalar scalar() {
    const void* data = pointer();
    const Dtype type = dtype();
    return {.data = data, .dtype = type, .value = request_.number()};
  }

  template <int kOperands>
  Layout<kOperands> dims() {
    Layout<kOperands> dims(request_.integer());
    for (Dim<kOperands>& dim : dims) {
      dim.size = request_.integer();
      for (int64_t& stride : dim.stride) stride = request_.integer();
    }
    return dims;
  }

  template <int kOperands>
  Layout<kOperands> layout() {
    return simplified(dims<kOperands>());
  }

  // The third operand: the number of the element in row-major order.
  static Layout<3> numbered(const Layout<2>& dims) {
    Layout<3> result;
    int64_t stride = 1;
    for (size_t d = dims.size(); d-- > 0; stride *= dims[d].size) {
      result.insert(result.begin(), {dims[d].size, {dims[d].stride[0], dims[d].stride[1], stride}});
    }
    return simplified(result);
  }

  std::vector<Span> spans() {
    std::vector<Span> spans(request_.integer());
    for (Span& span : spans) {
      span.data = pointer();
      span.dtype = dtype();
      span.numel = request_.integer();
      span.layout = layout<1>();
    }
    return spans;
  }

  std::vector<NumberedPair> numbered_pairs() {
    std::vector<NumberedPair> pairs(request_.integer());
    for (size_t i = 0; i < pairs.size(); ++i) {
      Pair& pair = pairs[i].pair;
      pair.main_grad = pointer();
      pair.main_dtype = dtype();
      pair.grad = pointer();
      pair.grad_dtype = dtype();
      pair.numel = pairs[i].numel = request_.integer();
      const Layout<2> all = dims<2>();
      pair.layout = simplified(all);
      pairs[i].layout = numbered(all);
      pairs[i].number = static_cast<int64_t>(i);
    }
    return pairs;
  }

  std::vector<Pair> pairs() {
    std::vector<Pair> pairs;
    for (const NumberedPair& numbered : numbered_pairs()) pairs.push_back(numbered.pair);
    return pairs;
  }

  void copy_rounded() {
    const auto* seed = static_cast<const int64_t*>(pointer());
    const auto* found_inf = static_cast<const float*>(pointer());
    if (seed == nullptr) {
      copy_rounded(Tensors<2>(pairs()), seed, found_inf);
    } else {
      copy_rounded(Tensors<3>(numbered_pairs()), seed, found_inf);
    }
  }

  template <int kOperands>
  void copy_rounded(const Tensors<kOperands>& tensors, const int64_t* seed,
                    const float* found_inf) {
    if (tensors.packed.chunks() == 0) return;
    device_.launch(copy_rounded_kernel<kOperands>, grid_, kBlockSize, tensors.table(), seed,
                   found_inf);
  }

  void window_factors() {
    const Scalar norm = scalar();
    Closing closing;
    for (Scalar* number : {&closing.unit, &closing.weight, &closing.scale, &closing.overflow,
                           &closing.found_inf, &closing.finite}) {
      *number = scalar();
    }
    closing.rules.max_norm = request_.number();
    for (bool* rule : {&closing.rules.clips, &closing.rules.weighted, &closing.rules.counted,
                       &closing.rules.normalised, &closing.rules.checks_norm}) {
      *rule = request_.integer() != 0;
    }
    closing.numbers = static_cast<double*>(pointer());
    closing.flags = static_cast<float*>(pointer());
    if (norm.data != nullptr) return device_.launch(close_window_kernel, 1, 1, norm, closing);
    const Dtype norm_dtype = dtype();
    outcome_ = {.norm_dtype = norm_dtype, .closing = closing};
    find_norm(Tensors<1>(spans()), Norm<NormKind::kSquares>{2.0});
  }

  template <int kOperands, NormKind kKind>
  void find_norm(const Tensors<kOperands>& tensors, const Norm<kKind>& norm) {
    if (tensors.packed.chunks() > 0) {
      device_.launch(norm_kernel<kKind, kOperands>, grid_, kBlockSize, tensors.table(), norm,
                     scale_, tensors.partials.data());
    }
    finish(tensors, norm);
  }

  template <int kOperands, NormKind kKind>
  void finish(const Tensors<kOperands>& tensors, const Norm<kKind>& norm) {
    device_.launch(finish_kernel<kKind>, 1, kFinishThreads, tensors.partials.data(),
                   tensors.packed.chunks(), norm, outcome_);
  }

  void accumulate(const Tensors<2>& pairs, bool overwrite) {
    launch_accumulate(pairs, nullptr, overwrite, pairs.partials.data());
    finish(pairs, Norm<NormKind::kSquares>{2.0});
  }

  template <NormKind kKind>
  void clip(const Tensors<2>& pairs, const Norm<kKind>& norm, bool overwrite) {
    const Array<Clip> clip(1);
    outcome_.clip = clip.data();
    find_norm(pairs, norm);
    launch_accumulate(pairs, clip.data(), overwrite, nullptr);
  }

  void launch_accumulate(const Tensors<2>& pairs, const Clip* clip, bool overwrite,
                         Partial* partials) {
    if (pairs.packed.chunks() == 0) return;
    device_.launch(accumulate_kernel, grid_, kBlockSize, pairs.table(), scale_, clip, overwrite,
                   partials);
  }

  void scale(const Tensors<1>& spans) {
    if (spans.packed.chunks() == 0) return;
    device_.launch(scale_kernel, grid_, kBlockSize, spans.table(), scale_);
  }

  Scalar scale_;
  Outcome outcome_;
};

}  // namespace

int main() { host_cuda::serve<Call>(); }
