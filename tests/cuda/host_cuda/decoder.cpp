// Runs an operation of the decoder on the kernels of csrc/cuda, on the host; see driver.cpp, and
// decoder.py for the request.
#include "instructions.h"
#include "request.h"
//
#include "cuda/decoder/clear_tokens.cuh"
#include "cuda/decoder/look_up.cuh"
#include "cuda/decoder/matrix.h"
#include "cuda/decoder/objective.cuh"
#include "cuda/decoder/rnn_advance.cuh"
#include "cuda/decoder/rnn_gradient.cuh"
#include "cuda/decoder/rnn_through_time.cuh"
#include "cuda/decoder/softmax_stats.cuh"

namespace {

using namespace accumext;
using namespace accumext::cuda;

class Call : public host_cuda::Run {
 public:
  using Run::Run;

  void run(std::string_view op) {
    if (op == "look_up") return look_up();
    if (op == "clear_tokens") return clear_tokens();
    if (op == "rnn_backward") return rnn_backward();
    next<Dtype>() == Dtype::kDouble ? run_in<double>(op) : run_in<float>(op);
  }

 private:
  template <typename T>
  void run_in(std::string_view op) {
    if (op == "softmax_stats") return softmax_stats<T>();
    if (op == "head_objective") return head_objective<T>();
    if (op == "rnn_pass_on") return pass_on<T>();
    switch (next<CellKind>()) {
      case CellKind::kGru:
        return step<T, CellKind::kGru>(op);
      case CellKind::kLstm:
        return step<T, CellKind::kLstm>(op);
      case CellKind::kRnnTanh:
        return step<T, CellKind::kRnnTanh>(op);
      case CellKind::kRnnRelu:
        return step<T, CellKind::kRnnRelu>(op);
    }
  }

  Lookup lookup() {
    Lookup lookup;
    read(lookup.table, lookup.rows, lookup.words, lookup.width, lookup.kept, lookup.scale);
    return lookup;
  }

  void look_up() {
    const auto rows = next<int64_t>();
    const auto* tokens = next<const int64_t*>();
    device_.launch(look_up_kernel, rows, kBlockSize, lookup(), tokens);
  }

  void clear_tokens() {
    int64_t rows, columns;
    AnyMatrix exps;
    Column<const int64_t> tokens;
    read(rows, columns, exps, tokens);
    device_.launch(clear_tokens_kernel, (rows + kBlockSize - 1) / kBlockSize, kBlockSize, exps,
                   tokens, rows, columns);
  }

  // In one launch. The number of a run is how many multiprocessors there are.
  void rnn_backward() {
    LayerGradient<float> call{};
    AnyMatrix weight;
    int64_t bands;
    read(call.kind, call.steps, call.batch, call.units, call.d_out, call.pre, call.h, call.c,
         call.active, call.gate, call.limit, weight, call.dh, call.dc, call.d_x, call.d_h, bands);
    call.gates = gate_count(call.kind);
    const DeviceLimits limits{.blocks = static_cast<int>(grid_),
                              .shared_bytes = 227 << 10,
                              .l2_bytes = 1 << 20,
                              .capability = 80};
    const ThroughTimePlan plan =
        through_time_plan(call.batch, call.units, call.gates, [&](int) { return limits; });
    if (plan.blocks == 0) host_cuda::fail("it does not fit", host_cuda::Site::current());
    if (bands != 0 && bands != plan.bands) {
      host_cuda::fail("the plan has other bands", host_cuda::Site::current());
    }
    const host_cuda::Memory scratch(plan.scratch_bytes);
    std::fill_n(scratch.data(), plan.scratch_bytes, std::byte{0});
    const auto kernel = weight.dtype == Dtype::kHalf
                            ? rnn_through_time_kernel_of<__half>(plan.tiles)
                            : rnn_through_time_kernel_of<__nv_bfloat16>(plan.tiles);
    device_.launch_together(kernel, plan.blocks, kBlockSize, plan.shared_bytes, call, weight, plan,
                            scratch.data());
  }

  template <typename T>
  void pass_on() {
    int64_t batch, units;
    Passing<T> passing{};
    read(batch, units, passing.dh, passing.dc, passing.product, passing.carry.gate,
         passing.carry.limit);
    device_.launch(rnn_pass_on_kernel<T>, batch * blocks_per_row(units), kBlockSize, units,
                   passing);
  }

  template <typename T>
  void softmax_stats() {
    int64_t count, columns;
    double temperature;
    Softmax<T> call{};
    Rows<T> rows{};
    FeedBack next_step;
    read(count, columns, temperature, call.logits, rows.targets, rows.uniforms, rows.exps,
         rows.tokens, rows.stats, call.bias, next_step.later);
    if (next_step.later > 0) {
      read(next_step.batch, next_step.pad, next_step.eos, next_step.rows, next_step.active,
           next_step.active_later, next_step.teacher, next_step.teacher_mask, next_step.inputs);
      next_step.lookup = lookup();
    }
    call.tiles = tiles_of(count, columns, call.logits, rows.exps);
    call.inverse_temperature = inverse_of<T>(temperature);
    const bool tempered = rows.uniforms.data != nullptr && temperature != 1.0;
    const host_cuda::Memory memory(softmax_workspace(call, tempered, nullptr));
    softmax_workspace(call, tempered, memory.data());
    const bool vectors = takes_vectors(call, rows.exps);
    vectors ? launch<T, kWidth<T>>(call, rows, next_step) : launch<T, 1>(call, rows, next_step);
  }

  template <typename T, int kCount>
  void launch(const Softmax<T>& call, const Rows<T>& rows, const FeedBack& next_step) {
    const int64_t bands = call.tiles.bands();
    const int64_t writers = rows.exps.data == nullptr ? 0 : grid_;
    device_.launch(softmax_chunks_kernel<T, kCount>, bands * grid_, kBlockSize, call);
    device_.launch(softmax_rows_kernel<T, kCount>, bands * (1 + writers), kBlockSize, call, rows,
                   next_step);
  }

  template <typename T>
  void head_objective() {
    int64_t count, columns;
    double temperature;
    Objective<T> call{};
    read(count, columns, temperature, call.rules.z_loss, call.rules.entropy_weight,
         call.rules.soft_scale, call.model.logits, call.model.bias, call.teacher.logits,
         call.teacher.bias, call.targets, call.share, call.size, call.probabilities, call.indices,
         call.gradients, call.tokens, call.stats);
    call.inverse_temperature = inverse_of<T>(temperature);
    const Tiles tiles = tiles_of(count, columns, call.model.logits, call.gradients);
    call.model.tiles = call.teacher.tiles = tiles;
    const host_cuda::Memory memory(objective_workspace(call, nullptr));
    objective_workspace(call, memory.data());
    device_.launch(objective_chunks_kernel<T>, tiles.bands() * grid_, kBlockSize, call);
    device_.launch(objective_rows_kernel<T>, tiles.bands(), kBlockSize, call);
    device_.launch(objective_gradients_kernel<T>, tiles.bands() * grid_, kBlockSize, call);
    const int64_t slots = std::min(grid_, (call.size + kBlockSize - 1) / kBlockSize);
    device_.launch(objective_given_kernel<T>, count * slots, kBlockSize, call);
  }

  template <typename T, CellKind kKind>
  void step(std::string_view op) {
    const auto batch = next<int64_t>(), units = next<int64_t>();
    const int64_t blocks = batch * blocks_per_row(units);
    if (op == "rnn_advance") {
      Advance<T> call{.units = units};
      read(call.from_x, call.from_h, call.active, call.h, call.c, call.h_next, call.c_next,
           call.bias_x, call.bias_h, call.operand, call.output, call.kept, call.scale);
      device_.launch(rnn_advance_kernel<T, kKind>, blocks, kBlockSize, call);
    } else {
      Gradient<T> call{.units = units};
      Passing<T> passing{};
      AnyMatrix operand;
      read(call.d_out, call.pre, call.h, call.c, call.c_next, call.active, passing.dh, passing.dc,
           call.d_x, call.d_h, operand, passing.product, passing.carry.gate, passing.carry.limit);
      device_.launch(rnn_gradient_kernel<T, kKind>, blocks, kBlockSize, call, passing, operand);
    }
  }
};

}  // namespace

int main(int, char** arguments) { host_cuda::serve<Call>(arguments[1]); }
