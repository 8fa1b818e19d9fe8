// Runs a gradient operation, by its name, on the kernels of csrc/cuda, on the host. __init__.py
// writes a request to standard input: the ways to run the call, the memory of its tensors, and its
// arguments. To standard output goes that memory as each run has left it.
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
using host_cuda::Tensor;

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

  void run(std::string_view op) {
    if (op == "window_factors") return window_factors();
    if (op == "copy_rounded_") return copy_rounded();
    if (op == "finish_norm") return finish_norm();
    read(scale_);
    if (op == "scale_") return scale(Tensors<1>(spans()));
    const auto norm = next<Tensor>();
    outcome_ = {.norm = norm.data, .norm_dtype = norm.dtype};
    read(outcome_.found_inf);
    if (op == "accumulate_") {
      const bool overwrite = next<bool>();
      return accumulate(Tensors<2>(pairs()), overwrite);
    }
    const auto p = next<double>();
    if (op == "total_norm") {
      return with_norm(p, [&](auto norm) { find_norm(Tensors<1>(spans()), norm); });
    }
    read(outcome_.max_norm, outcome_.if_finite);
    const bool overwrite = next<bool>();
    with_norm(p, [&](auto norm) { clip(Tensors<2>(pairs()), norm, overwrite); });
  }

 private:
  // As in csrc/common/arguments.h.
  template <int kOperands, int kTensors>
  static Layout<kOperands> layout(const Tensor* const (&tensors)[kTensors]) {
    if (tensors[0]->numel() == 0 || std::ranges::all_of(tensors, &Tensor::contiguous)) return {};
    Layout<kOperands> dims(tensors[0]->sizes.size());
    int64_t dense = 1;
    for (size_t d = dims.size(); d-- > 0; dense *= dims[d].size) {
      dims[d].size = tensors[0]->sizes[d];
      for (int k = 0; k < kTensors; ++k) dims[d].stride[k] = tensors[k]->strides[d];
      for (int k = kTensors; k < kOperands; ++k) dims[d].stride[k] = dense;
    }
    return simplified(dims);
  }

  std::vector<Span> spans() {
    std::vector<Span> spans;
    for (const Tensor& tensor : next<std::vector<Tensor>>()) {
      spans.push_back({tensor.data, tensor.dtype, tensor.numel(), layout<1>({&tensor})});
    }
    return spans;
  }

  std::vector<NumberedPair> numbered_pairs() {
    const auto main_grads = next<std::vector<Tensor>>(), grads = next<std::vector<Tensor>>();
    std::vector<NumberedPair> pairs;
    for (size_t i = 0; i < grads.size(); ++i) {
      const Tensor &main_grad = main_grads[i], &grad = grads[i];
      const Pair pair{main_grad.data, grad.data,    main_grad.dtype,
                      grad.dtype,     grad.numel(), layout<2>({&main_grad, &grad})};
      pairs.push_back({pair, pair.numel, layout<3>({&main_grad, &grad}), static_cast<int64_t>(i)});
    }
    return pairs;
  }

  std::vector<Pair> pairs() {
    std::vector<Pair> pairs;
    for (const NumberedPair& numbered : numbered_pairs()) pairs.push_back(numbered.pair);
    return pairs;
  }

  void copy_rounded() {
    const auto* seed = next<const int64_t*>();
    const auto* found_inf = next<const float*>();
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

  // The root of 0 + 1 + ... from so many partial sums, which a list would take long to make.
  void finish_norm() {
    const auto norm = next<Tensor>();
    const auto count = next<int64_t>();
    const Array<Partial> partials(count);
    for (int64_t i = 0; i < count; ++i) partials.data()[i] = {static_cast<double>(i), true};
    outcome_ = {.norm = norm.data, .norm_dtype = norm.dtype};
    device_.launch(finish_kernel<NormKind::kSquares>, 1, kFinishThreads, partials.data(), count,
                   Norm<NormKind::kSquares>{2.0}, outcome_);
  }

  void window_factors() {
    Closing closing;
    WindowRules& rules = closing.rules;
    const auto norm = next<Scalar>();
    read(closing.unit, closing.weight, closing.scale, closing.overflow, closing.found_inf,
         closing.finite, rules.max_norm, rules.clips, rules.weighted, rules.counted,
         rules.normalised, rules.checks_norm, closing.numbers, closing.flags);
    if (norm.data != nullptr) return device_.launch(close_window_kernel, 1, 1, norm, closing);
    outcome_ = {.norm_dtype = next<Dtype>(), .closing = closing};
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

int main(int, char** arguments) { host_cuda::serve<Call>(arguments[1]); }
