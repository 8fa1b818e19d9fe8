#include <algorithm>
#include <optional>
#include <vector>

#include "common/decode_call.h"
#include "cuda/decoder/head.h"
#include "cuda/decoder/look_up.cuh"
#include "cuda/decoder/persistent_launch.h"
#include "cuda/decoder/rnn_layer.h"

namespace accumext::cuda {
namespace {

// Rows whose inputs are multiplied at once if they are known.
constexpr int64_t kInputRows = 2048;

// Every row goes through the head, active or not: else the host would have to wait for the device.
template <typename T>
class Decoding {
 public:
  explicit Decoding(const DecodeCall& call)
      : call_(call),
        begin_(call.begin),
        end_(call.end),
        steps_(call.inputs.size(0)),
        batch_(call.inputs.size(1)),
        units_(call.states[0].size(2)),
        width_(call.table.size(1)),
        views_(call.states[0]),
        queue_(views_.device_index()),
        inputs_(tokens<int64_t>(call.inputs)),
        active_(tokens<bool>(call.active)) {
    require(0 <= begin_ && begin_ < end_ && end_ <= steps_ && batch_ > 0 && !call.pre);
    const size_t parts = call.kind == CellKind::kLstm ? 2 : 1;
    const size_t layers = call.cell.size() / 4;
    require(call.cell.size() == layers * 4 && call.states.size() == layers * parts && layers > 0);
    for (const Tensor& state : call.states) {
      require(state.dim() == 3 && state.size(0) == steps_ + 1 && state.size(1) == batch_);
      require(state.size(2) == units_);
    }
    for (size_t l = 0; l < layers; ++l) {
      const Tensor* const w = &call.cell[4 * l];
      std::optional<Tensor> memory;
      if (parts == 2) memory = call.states[2 * l + 1];
      layers_.emplace_back(queue_, views_, call.kind, w[0], w[1], w[2], w[3],
                           call.states[parts * l], memory, active_);
      require(layers_[l].inputs() == (l == 0 ? width_ : units_));
      require(w[0].scalar_type() == call.cell[0].scalar_type());
    }
    if (call.between.mask) {
      dropout_mask_ = views_.dense<const bool>(*call.between.mask, steps_ * masks_per_step());
    }
    if (call.of_outputs.mask) {
      output_mask_ = views_.dense<const bool>(*call.of_outputs.mask, steps_ * batch_ * units_);
    }
    if (call.of_inputs.mask) {
      input_mask_ = views_.dense<const bool>(*call.of_inputs.mask, steps_ * batch_ * width_);
      lookup_.scale = call.of_inputs.scale;
    }
    lookup_.table = views_.operand(call.table, call.table.size(0), width_);
    require(lookup_.table.column_stride == 1 || width_ <= 1);
    lookup_.words = call.table.size(0);
    lookup_.width = width_;
  }

  // Returns the number of rows that went through the head.
  int64_t run() {
    if (!call_.stats) {
      run_known();
      return 0;
    }
    check_head();
    const std::optional<PersistentCall> window = persistent_call();
    if (window && persistent_fits(queue_, *window)) {
      launch_persistent(queue_, *window);
    } else {
      run_free();
    }
    return (end_ - begin_) * batch_;
  }

 private:
  template <typename E>
  E* tokens(const Tensor& tensor) const {
    return views_.template dense<E>(tensor, steps_ * batch_);
  }

  template <typename E>
  E* tokens(const std::optional<Tensor>& tensor) const {
    return views_.template dense<E>(tensor, steps_ * batch_);
  }

  int64_t masks_per_step() const {  // elements
    return (static_cast<int64_t>(layers_.size()) - 1) * batch_ * units_;
  }

  // Memory for the products of `n` steps at once.
  struct Buffers {
    Tensor x;        // [n B, E]: what the first layer reads
    Tensor between;  // [n B, H]: what the other layers read
    Tensor from_x;   // [n B, gates H]

    Buffers rows(int64_t count) const {
      const auto first = [count](Tensor t) { return torch::stable::narrow(t, 0, 0, count); };
      return {first(x), first(between), first(from_x)};
    }
  };

  Buffers buffers(int64_t steps) const {
    const int64_t rows = steps * batch_;
    const auto dtype = call_.cell[0].scalar_type();
    return {queue_.empty({rows, width_}, dtype), queue_.empty({rows, units_}, dtype),
            queue_.empty({rows, gate_count(call_.kind) * units_}, dtype_of<T>())};
  }

  // Steps whose inputs are known, layer by layer.
  void run_known() {
    for (Layer<T>& layer : layers_) layer.start(begin_);
    const int64_t most = std::clamp<int64_t>(kInputRows / batch_, 1, end_ - begin_);
    const Buffers all = buffers(most);
    for (int64_t step = begin_; step < end_; step += most) {
      const Buffers some = all.rows(std::min(most, end_ - step) * batch_);
      look_up(step, some.x);
      advance(step, some, {});
    }
  }

  // Writes x for the inputs from this step on.
  void look_up(int64_t step, const Tensor& x) {
    lookup_.rows = views_.any_matrix(x, x.size(0), width_);
    lookup_.kept = kept_inputs(step);
    queue_.launch(look_up_kernel, x.size(0), kBlockSize, lookup_, inputs_ + step * batch_);
  }

  // Elements of the inputs from this step on that dropout keeps.
  const bool* kept_inputs(int64_t step) const {
    return input_mask_ == nullptr ? nullptr : input_mask_ + step * batch_ * width_;
  }

  // Runs as many steps as the buffers have rows for; x has their inputs.
  void advance(int64_t step, const Buffers& buffers, const Outputs<T>& last) {
    const int64_t count = buffers.between.size(0);
    for (size_t l = 0; l < layers_.size(); ++l) {
      Outputs<T> outputs = last;
      if (l + 1 < layers_.size()) {
        outputs = {.rows = views_.any_matrix(buffers.between, count, units_)};
        if (dropout_mask_ != nullptr) {
          const int64_t masks = step * masks_per_step() + static_cast<int64_t>(l) * batch_ * units_;
          outputs.kept = dropout_mask_ + masks;
          outputs.kept_stride = masks_per_step();
          outputs.scale = static_cast<T>(call_.between.scale);
        }
      }
      layers_[l].run(step, l == 0 ? buffers.x : buffers.between, buffers.from_x, outputs);
    }
  }

  void check_head() {
    const int64_t most = (end_ - begin_) * batch_;
    require(call_.head_weight.dim() == 2 && call_.head_weight.size(1) == units_);
    require(call_.stats->dim() == 2 && call_.stats->size(1) >= most);
    require(call_.rows && call_.rows->numel() >= most && (call_.eos < 0 || active_ != nullptr));
    names_ = views_.template dense<int64_t>(*call_.rows, call_.rows->numel());
    require(!call_.exps || call_.exps->size(0) >= most);
    require(call_.temperature > 0.0);
  }

  // The window as an argument of the persistent kernel; nothing if that kernel cannot run these
  // dtypes, layers or dropout around them.
  std::optional<PersistentCall> persistent_call() const {
    const Dtype operand = float_dtype(call_.head_weight);
    const bool narrow = operand == Dtype::kHalf || operand == Dtype::kBFloat16;
    if constexpr (std::is_same_v<T, float>) {
      const bool whole = input_mask_ == nullptr && output_mask_ == nullptr;
      if (narrow && whole && float_dtype(call_.cell[0]) == operand &&
          layers_.size() <= kMaxLayers) {
        return persistent_call(operand);
      }
    }
    return std::nullopt;
  }

  PersistentCall persistent_call(Dtype operand) const {
    const int64_t vocabulary = call_.head_weight.size(0);
    const auto weight = [&](const Tensor& tensor, int64_t rows, int64_t columns) {
      return views_.operand(tensor, rows, columns).template as<const uint16_t>();
    };
    const auto vector = [&](const Tensor& tensor, int64_t size) {
      return tensor.numel() == 0 ? AnyVector{}
                                 : AnyVector{views_.template dense<const float>(tensor, size)};
    };
    PersistentCall window{
        .kind = call_.kind,
        .operand = operand,
        .layers = static_cast<int>(layers_.size()),
        .batch = batch_,
        .inputs = width_,
        .units = units_,
        .vocabulary = vocabulary,
        .steps = steps_,
        .begin = begin_,
        .end = end_,
        .table = lookup_.table,
        .table_rows = lookup_.words,
        .layer = {},
        .dropout_mask = dropout_mask_,
        .dropout_scale = static_cast<float>(call_.between.scale),
        .inputs_fed = inputs_,
        .teacher = tokens<const int64_t>(call_.teacher),
        .teacher_mask = tokens<const bool>(call_.teacher_mask),
        .active = active_,
        .eos = call_.eos,
        .pad = call_.pad,
        .uniforms = tokens<const double>(call_.uniforms),
        .temperature = call_.temperature,
        .head = weight(call_.head_weight, vocabulary, units_),
        .head_bias = call_.head_bias ? vector(*call_.head_bias, vocabulary) : AnyVector{},
        .targets = tokens<const int64_t>(call_.targets),
        .tokens = tokens<int64_t>(call_.tokens),
        .exps = exps(vocabulary),
        .stats = views_.template matrix<float>(*call_.stats, 3, call_.stats->size(1)),
        .rows = names_};
    const int64_t gates = gate_count(call_.kind) * units_;
    const size_t parts = call_.states.size() / layers_.size();
    const auto state = [&](size_t index) {
      return views_.template dense<float>(call_.states[index], (steps_ + 1) * batch_ * units_);
    };
    for (size_t l = 0; l < layers_.size(); ++l) {
      const Tensor* const w = &call_.cell[4 * l];
      window.layer[l] = {.weight_ih = weight(w[0], gates, layers_[l].inputs()),
                         .weight_hh = weight(w[1], gates, units_),
                         .bias_ih = vector(w[2], gates),
                         .bias_hh = vector(w[3], gates),
                         .h = state(l * parts),
                         .c = parts == 2 ? state(l * parts + 1) : nullptr};
    }
    return window;
  }

  AnyMatrix exps(int64_t vocabulary) const {
    if (!call_.exps) return {};
    return views_.any_matrix(call_.exps, call_.exps->size(0), vocabulary);
  }

  // Steps that read what the one before them predicts.
  void run_free() {
    for (Layer<T>& layer : layers_) layer.start(begin_);
    Head<T> head(queue_, views_, call_.head_weight, call_.head_bias,
                 std::min(call_.logit_rows, batch_), call_.uniforms.has_value(), call_.temperature);
    const int64_t columns = call_.stats->size(1);
    const Rows<T> rows{.targets = {tokens<const int64_t>(call_.targets), 1},
                       .uniforms = {tokens<const double>(call_.uniforms), 1},
                       .exps = exps(head.vocabulary()),
                       .tokens = {tokens<int64_t>(call_.tokens), 1},
                       .stats = views_.template matrix<T>(*call_.stats, 3, columns)};
    const Tensor hidden = queue_.empty({batch_, units_}, call_.head_weight.scalar_type());
    const Buffers one = buffers(1);
    look_up(begin_, one.x);
    for (int64_t step = begin_; step < end_; ++step) {
      Outputs<T> outputs{.rows = views_.any_matrix(hidden, batch_, units_)};
      if (output_mask_ != nullptr) {
        outputs.kept = output_mask_ + step * batch_ * units_;
        outputs.kept_stride = batch_ * units_;
        outputs.scale = static_cast<T>(call_.of_outputs.scale);
      }
      advance(step, one, outputs);
      head.evaluate(hidden, rows_of(rows, step), feed_back(step));
    }
  }

  // The rows of a step. Tokens, targets and uniforms are of all steps, results of the call's steps.
  Rows<T> rows_of(const Rows<T>& rows, int64_t step) const {
    Rows<T> result = rows.from((step - begin_) * batch_);
    const Rows<T> of_all = rows.from(step * batch_);
    result.targets = of_all.targets;
    result.uniforms = of_all.uniforms;
    result.tokens = of_all.tokens;
    return result;
  }

  FeedBack feed_back(int64_t step) const {
    const auto next = [&](auto* all) {
      return all == nullptr ? nullptr : all + (step + 1) * batch_;
    };
    FeedBack result{.rows = names_ + (step - begin_) * batch_,
                    .first_row = step * batch_,
                    .active = active_ == nullptr ? nullptr : active_ + step * batch_,
                    .pad = call_.pad,
                    .later = steps_ - step - 1};
    if (result.later == 0) return result;
    result.active_later = next(active_);
    result.batch = batch_;
    result.eos = call_.eos;
    result.teacher = next(tokens<const int64_t>(call_.teacher));
    result.teacher_mask = next(tokens<const bool>(call_.teacher_mask));
    result.inputs = next(inputs_);
    result.lookup = lookup_;
    result.lookup.kept = kept_inputs(step + 1);
    return result;
  }

  const DecodeCall& call_;
  int64_t begin_, end_, steps_, batch_, units_;
  int64_t width_;  // E
  Views views_;
  Queue queue_;
  int64_t* inputs_;
  bool* active_;
  const bool* dropout_mask_ = nullptr;
  const bool* input_mask_ = nullptr;
  const bool* output_mask_ = nullptr;
  int64_t* names_ = nullptr;  // [rows]: the numbers of the head's rows
  Lookup lookup_;
  std::vector<Layer<T>> layers_;
};

}  // namespace
}  // namespace accumext::cuda

STABLE_TORCH_LIBRARY_IMPL(accumext, CUDA, m) {
  m.impl("decode_steps", accumext::boxed<accumext::decode_steps<accumext::cuda::Decoding>>);
}
