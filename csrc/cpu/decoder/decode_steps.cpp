#include <algorithm>
#include <numeric>
#include <vector>

#include "common/decode_call.h"
#include "cpu/decoder/head_forward.h"
#include "cpu/decoder/known_steps.h"
#include "cpu/decoder/look_up.h"
#include "cpu/decoder/rnn_advance.h"

namespace accumext::cpu {
namespace {

template <typename T>
class Decoding {
 public:
  explicit Decoding(const DecodeCall& call)
      : call_(call),
        begin_(call.begin),
        end_(call.end),
        steps_(call.inputs.size(0)),
        batch_(call.inputs.size(1)),
        width_(padded(batch_)),
        inputs_(integers(call.inputs)),
        active_(call.active ? booleans(*call.active) : nullptr),
        looked_up_(call),
        row_(looked_up_.width),
        x_(looked_up_.width * width_) {
    require(0 <= begin_ && begin_ < end_ && end_ <= steps_ && batch_ > 0);
    const size_t parts = call.kind == CellKind::kLstm ? 2 : 1;
    require(call.cell.size() % 4 == 0 && call.cell.size() * parts == call.states.size() * 4);
    require(!call.active || call.active->numel() == steps_ * batch_);
    for (size_t i = 0; i < call.cell.size(); i += 4) {
      layers_.emplace_back(call.kind, call.cell[i], call.cell[i + 1], call.cell[i + 2],
                           call.cell[i + 3], batch_);
      const size_t depth = i == 0 ? call.table.size(1) : layers_[i / 4 - 1].units();
      require(layers_.back().inputs() == static_cast<int64_t>(depth));
    }
    require(!layers_.empty());
    for (const Tensor& state : call.states) {
      require(state.dim() == 3 && state.size(0) == steps_ + 1 && state.size(1) == batch_);
      require(state.size(2) == layers_[0].units());
      states_.push_back(elements<T>(state));
    }
    std::fill_n(x_.get(), looked_up_.width * width_, T(0));
    if (call.between.mask) {
      const auto masks = static_cast<int64_t>(layers_.size()) - 1;
      require(call.between.mask->numel() == steps_ * masks * batch_ * layers_[0].units());
      dropout_mask_ = booleans(*call.between.mask);
    }
    if (call.of_outputs.mask) {
      require(call.of_outputs.mask->numel() == steps_ * batch_ * layers_[0].units());
      output_mask_ = booleans(*call.of_outputs.mask);
    }
    if (call.pre) {
      require(gate_count(call.kind) > 1);
      const auto states = static_cast<int64_t>(layers_.size()) * steps_ * batch_;
      require(call.pre->numel() == states * kPreActivations * layers_[0].units());
    }
    if (call.between.mask || call.of_outputs.mask) {
      dropped_.emplace(layers_[0].units() * width_);
      std::fill_n(dropped_->get(), layers_[0].units() * width_, T(0));
    }
  }

  // Returns the number of rows that went through the head.
  int64_t run() {
    if (!call_.stats && (call_.pre || end_ - begin_ >= kFewestKnownSteps)) {
      KnownSteps<T>(call_).run();
      return 0;
    }
    for (size_t l = 0; l < layers_.size(); ++l)
      layers_[l].start(state(l, begin_), memory(l, begin_));
    int64_t used = 0;
    const int64_t threads = call_.stats ? most_threads(call_.head_weight) : 1;
    Team::gather(std::max(threads, layers_[0].units() / kUnits),
                 [&](Team& team) { used = run_steps(team); });
    return used;
  }

 private:
  int64_t run_steps(Team& team) {
    const Workspace workspace(call_.exps);
    std::optional<Head<T>> head;
    if (call_.stats) {
      const int64_t logit_rows = std::min({call_.logit_rows, kMaxLogitRows, batch_});
      head.emplace(team, call_.head_weight, elements<T>(call_.head_bias), logit_rows,
                   call_.temperature, workspace.dtype, workspace.stride);
      check_head(*head, workspace);
    }
    int64_t used = 0;
    for (int64_t step = begin_; step < end_; ++step) {
      if (all_ended(step)) {
        keep_states(step);
        if (head)
          std::fill(inputs_ + (step + 1) * batch_, inputs_ + fed_until() * batch_, call_.pad);
        break;
      }
      embed(step);
      for (size_t l = 0; l < layers_.size(); ++l) {
        layers_[l].step(team, l == 0 ? x_.get() : between(step, l), active_at(step),
                        state(l, step + 1), memory(l, step + 1), pre_activations(l, step));
      }
      if (!head) continue;
      used += predict(step, used, *head, workspace);
      feed_back(step);
    }
    return used;
  }

  int64_t parts() const { return call_.kind == CellKind::kLstm ? 2 : 1; }

  T* state(size_t layer, int64_t step) const {
    return states_[layer * parts()] + step * batch_ * layers_[layer].units();
  }

  T* memory(size_t layer, int64_t step) const {
    if (call_.kind != CellKind::kLstm) return nullptr;
    return states_[layer * 2 + 1] + step * batch_ * layers_[layer].units();
  }

  T* pre_activations(size_t layer, int64_t step) const {
    if (!call_.pre) return nullptr;
    const int64_t at = static_cast<int64_t>(layer) * steps_ + step;
    return elements<T>(*call_.pre) + at * batch_ * kPreActivations * layers_[layer].units();
  }

  const bool* active_at(int64_t step) const {
    return active_ == nullptr ? nullptr : active_ + step * batch_;
  }

  // Tells whether no row is active from this step on.
  bool all_ended(int64_t step) const {
    const bool* active = active_at(step);
    return active != nullptr && std::none_of(active, active + batch_, [](bool b) { return b; });
  }

  // Each step chooses the next one's input, unless it is the last of all.
  int64_t fed_until() const { return std::min(end_ + 1, steps_); }

  // Copies the states before this step to all later ones: no row is active any more.
  void keep_states(int64_t step) const {
    const int64_t size = batch_ * layers_[0].units();
    for (T* state : states_) {
      for (int64_t later = step + 1; later <= end_; ++later) {
        std::copy_n(state + step * size, size, state + later * size);
      }
    }
  }

  // x [E, width] of this step's inputs.
  void embed(int64_t step) {
    for (int64_t b = 0; b < batch_; ++b) {
      looked_up_.read(step * batch_ + b, row_.get());
      for (int64_t k = 0; k < looked_up_.width; ++k) x_[k * width_ + b] = row_[k];
    }
  }

  // The input of `layer`: the state below it, with units dropped.
  const T* between(int64_t step, size_t layer) {
    const T* below = layers_[layer - 1].h();
    if (dropout_mask_ == nullptr) return below;
    const auto masks = static_cast<int64_t>(layers_.size()) - 1;
    const int64_t at = step * masks + static_cast<int64_t>(layer) - 1;
    return dropped(below, dropout_mask_ + at * batch_ * layers_[0].units(), call_.between.scale);
  }

  // The input of the head: the state of the last layer, with units dropped.
  const T* output(int64_t step) {
    const T* h = layers_.back().h();
    if (output_mask_ == nullptr) return h;
    return dropped(h, output_mask_ + step * batch_ * layers_[0].units(), call_.of_outputs.scale);
  }

  // h [H, width] without the units that mask [B, H] drops.
  const T* dropped(const T* h, const bool* mask, double scale_of_kept) {
    const int64_t units = layers_[0].units();
    const T scale = static_cast<T>(scale_of_kept);
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t j = 0; j < units; ++j) {
        const int64_t at = j * width_ + b;
        (*dropped_)[at] = mask[b * units + j] ? h[at] * scale : T(0);
      }
    }
    return dropped_->get();
  }

  void check_head(const Head<T>& head, const Workspace& workspace) const {
    const int64_t most = (end_ - begin_) * batch_;
    require(head.depth() == layers_.back().units());
    require(!call_.head_bias || call_.head_bias->numel() == head.vocabulary());
    require(!call_.targets || call_.targets->numel() == steps_ * batch_);
    require(call_.tokens.numel() == steps_ * batch_);
    require(call_.stats->dim() == 2 && call_.stats->size(0) == 3 && call_.stats->size(1) >= most);
    require(call_.rows && call_.rows->numel() >= most);
    require(workspace.data == nullptr || workspace.rows >= most);
    require(!call_.uniforms || call_.uniforms->numel() == steps_ * batch_);
    require(!call_.teacher_mask || call_.teacher_mask->numel() == steps_ * batch_);
    require(!call_.teacher || call_.teacher->numel() == steps_ * batch_);
    require(call_.eos < 0 || call_.active);
    if (!call_.targets) return;
    const int64_t* targets = integers(*call_.targets);
    for (int64_t i = begin_ * batch_; i < end_ * batch_; ++i) {
      require(targets[i] >= 0 && targets[i] < head.vocabulary());
    }
  }

  // Takes the step's active rows through the head; returns their number.
  int64_t predict(int64_t step, int64_t used, Head<T>& head, const Workspace& workspace) {
    const bool* active = active_at(step);
    std::vector<int64_t> named;  // the active rows, if not all are
    for (int64_t b = 0; b < batch_; ++b) {
      if (active == nullptr || active[b]) named.push_back(b);
    }
    const auto count = static_cast<int64_t>(named.size());
    const bool all = count == batch_ && count <= head.logit_rows();
    const int64_t most = call_.stats->size(1);
    T* stats = elements<T>(*call_.stats);
    int64_t* rows = integers(*call_.rows);
    const int64_t* targets = call_.targets ? integers(*call_.targets) + step * batch_ : nullptr;
    const double* uniforms =
        call_.uniforms ? elements<double>(*call_.uniforms) + step * batch_ : nullptr;
    std::vector<int64_t> target(targets != nullptr ? count : 0), token(count);
    std::vector<double> uniform(uniforms != nullptr ? count : 0);
    for (int64_t i = 0; i < count; ++i) {
      rows[used + i] = step * batch_ + named[i];
      if (targets != nullptr) target[i] = targets[named[i]];
      if (uniforms != nullptr) uniform[i] = uniforms[named[i]];
    }
    const T* hidden = output(step);
    for (int64_t done = 0; done < count; done += head.logit_rows()) {
      head.evaluate(hidden, width_, all ? nullptr : named.data() + done,
                    {.count = std::min(head.logit_rows(), count - done),
                     .targets = targets == nullptr ? nullptr : target.data() + done,
                     .uniforms = uniforms == nullptr ? nullptr : uniform.data() + done,
                     .tokens = token.data() + done,
                     .peak = stats + used + done,
                     .total = stats + most + used + done,
                     .target_logit = stats + 2 * most + used + done,
                     .exps = workspace.row(used + done)});
    }
    int64_t* tokens = integers(call_.tokens) + step * batch_;
    for (int64_t i = 0; i < count; ++i) tokens[named[i]] = token[i];
    return count;
  }

  // Writes which rows have ended, and the inputs of the next step.
  void feed_back(int64_t step) {
    if (step + 1 == steps_) return;
    const int64_t* tokens = integers(call_.tokens) + step * batch_;
    const int64_t next = (step + 1) * batch_;
    if (call_.eos >= 0) {
      for (int64_t b = 0; b < batch_; ++b) {
        if (!active_[step * batch_ + b] || tokens[b] != call_.eos) continue;
        for (int64_t later = step + 1; later < steps_; ++later) active_[later * batch_ + b] = false;
      }
    }
    const bool* mask = call_.teacher_mask ? booleans(*call_.teacher_mask) + next : nullptr;
    const int64_t* teacher = call_.teacher ? integers(*call_.teacher) + next : nullptr;
    for (int64_t b = 0; b < batch_; ++b) {
      const bool use_teacher = teacher != nullptr && (mask == nullptr || mask[b]);
      const int64_t token = use_teacher ? teacher[b] : tokens[b];
      inputs_[next + b] = active_ == nullptr || active_[next + b] ? token : call_.pad;
    }
  }

  const DecodeCall& call_;
  int64_t begin_, end_, steps_, batch_;
  int64_t width_;  // padded(batch)
  int64_t* inputs_;
  bool* active_;
  const bool* dropout_mask_ = nullptr;
  const bool* output_mask_ = nullptr;
  LookUp<T> looked_up_;
  Buffer<T> row_;  // [E]
  Buffer<T> x_;    // [E, width]
  std::optional<Buffer<T>> dropped_;
  std::vector<Layer<T>> layers_;
  std::vector<T*> states_;
};

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("decode_steps", accumext::boxed<accumext::decode_steps<accumext::cpu::Decoding>>);
}
