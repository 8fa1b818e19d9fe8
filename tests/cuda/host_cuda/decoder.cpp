// Runs an operation of the decoder on the kernels of csrc/cuda, on the host; see driver.cpp, and
// decoder.py for the request.
#include "instructions.h"
#include "request.h"
//
#include <type_traits>

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

  void run() {
    const int64_t op = request_.integer();
    const bool wide = dtype() == Dtype::kDouble;
    if (op == 0) return wide ? softmax_stats<double>() : softmax_stats<float>();
    if (op == 3) return wide ? pass_on<double>() : pass_on<float>();
    if (op == 4) return look_up();
    if (op == 5) return clear_tokens();
    if (op == 6) return through_time();
    if (op == 7) return wide ? head_objective<double>() : head_objective<float>();
    wide ? with_kind<double>(op) : with_kind<float>(op);
  }

 private:
  AnyMatrix any_matrix() {
    void* const data = pointer();
    const Dtype type = dtype();
    const int64_t row_stride = request_.integer();
    const int64_t column_stride = request_.integer();
    return {data, type, row_stride, column_stride};
  }

  template <typename T>
  Matrix<T> matrix() {
    return any_matrix().as<T>();
  }

  template <typename T>
  Column<T> column() {
    T* const data = static_cast<T*>(pointer());
    const int64_t stride = request_.integer();
    return {data, stride};
  }

  template <typename T>
  T* of_type() {
    return static_cast<T*>(pointer());
  }

  Lookup lookup() {
    Lookup lookup;
    lookup.table = any_matrix();
    lookup.rows = any_matrix();
    lookup.words = request_.integer();
    lookup.width = request_.integer();
    lookup.kept = of_type<const bool>();
    lookup.scale = request_.number();
    return lookup;
  }

  FeedBack feed_back() {
    FeedBack next;
    next.later = request_.integer();
    if (next.later == 0) return next;
    next.batch = request_.integer();
    next.pad = request_.integer();
    next.eos = request_.integer();
    next.rows = of_type<int64_t>();
    next.active = of_type<const bool>();
    next.active_later = of_type<bool>();
    next.teacher = of_type<const int64_t>();
    next.teacher_mask = of_type<const bool>();
    next.inputs = of_type<int64_t>();
    next.lookup = lookup();
    return next;
  }

  void look_up() {
    const int64_t rows = request_.integer();
    const auto* tokens = of_type<const int64_t>();
    device_.launch(look_up_kernel, rows, kBlockSize, lookup(), tokens);
  }

  void clear_tokens() {
    const int64_t rows = request_.integer();
    const int64_t columns = request_.integer();
    const AnyMatrix exps = any_matrix();
    device_.launch(clear_tokens_kernel, (rows + kBlockSize - 1) / kBlockSize, kBlockSize, exps,
                   column<const int64_t>(), rows, columns);
  }

  // The number of a run is how many multiprocessors there are.
  void through_time() {
    LayerGradient<float> call{};
    call.kind = static_cast<CellKind>(request_.integer());
    for (int64_t* number : {&call.steps, &call.batch, &call.units}) *number = request_.integer();
    call.gates = gate_count(call.kind);
    for (const float** tensor : {&call.d_out, &call.pre, &call.h, &call.c}) {
      *tensor = of_type<const float>();
    }
    call.active = of_type<const bool>();
    call.gate = of_type<const float>();
    call.limit = of_type<const float>();
    const AnyMatrix weight = any_matrix();
    call.dh = matrix<float>();
    call.dc = matrix<float>();
    call.d_x = of_type<float>();
    call.d_h = of_type<float>();
    const DeviceLimits limits{.blocks = static_cast<int>(grid_),
                              .shared_bytes = 227 << 10,
                              .l2_bytes = 1 << 20,
                              .capability = 80};
    const ThroughTimePlan plan =
        through_time_plan(call.batch, call.units, call.gates, [&](int) { return limits; });
    if (plan.blocks == 0) host_cuda::fail("it does not fit", host_cuda::Site::current());
    const int64_t bands = request_.integer();
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
    const int64_t batch = request_.integer();
    const int64_t units = request_.integer();
    Passing<T> passing{};
    passing.dh = matrix<T>();
    passing.dc = matrix<T>();
    passing.product = matrix<const T>();
    passing.carry = {column<const T>(), of_type<const T>()};
    device_.launch(rnn_pass_on_kernel<T>, batch * blocks_per_row(units), kBlockSize, units,
                   passing);
  }

  template <typename T>
  void softmax_stats() {
    Softmax<T> call{};
    const int64_t count = request_.integer();
    const int64_t columns = request_.integer();
    const double temperature = request_.number();
    call.logits = matrix<const T>();
    Rows<T> rows{};
    rows.targets = column<const int64_t>();
    rows.uniforms = column<const double>();
    rows.exps = any_matrix();
    rows.tokens = column<int64_t>();
    rows.stats = matrix<T>();
    call.bias = column<const T>();
    const FeedBack next = feed_back();
    call.tiles = tiles_of(count, columns, call.logits, rows.exps);
    call.inverse_temperature = inverse_of<T>(temperature);
    const bool tempered = rows.uniforms.data != nullptr && temperature != 1.0;
    const host_cuda::Memory memory(softmax_workspace(call, tempered, nullptr));
    softmax_workspace(call, tempered, memory.data());
    if (takes_vectors(call, rows.exps)) {
      launch<T, kWidth<T>>(call, rows, next);
    } else {
      launch<T, 1>(call, rows, next);
    }
  }

  template <typename T, int kCount>
  void launch(const Softmax<T>& call, const Rows<T>& rows, const FeedBack& next) {
    const int64_t bands = call.tiles.bands();
    const int64_t writers = rows.exps.data == nullptr ? 0 : grid_;
    device_.launch(softmax_chunks_kernel<T, kCount>, bands * grid_, kBlockSize, call);
    device_.launch(softmax_rows_kernel<T, kCount>, bands * (1 + writers), kBlockSize, call, rows,
                   next);
  }

  template <typename T>
  void head_objective() {
    const int64_t count = request_.integer();
    const int64_t columns = request_.integer();
    Objective<T> call{.inverse_temperature = inverse_of<T>(request_.number())};
    for (double* rule : {&call.rules.z_loss, &call.rules.entropy_weight, &call.rules.soft_scale}) {
      *rule = request_.number();
    }
    call.model.logits = matrix<const T>();
    call.model.bias = column<const T>();
    call.teacher.logits = matrix<const T>();
    call.teacher.bias = column<const T>();
    call.targets = column<const int64_t>();
    call.share = column<const T>();
    call.size = request_.integer();
    call.probabilities = matrix<const T>();
    call.indices = matrix<const int64_t>();
    call.gradients = any_matrix();
    call.tokens = column<int64_t>();
    call.stats = matrix<T>();
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

  template <typename T>
  void with_kind(int64_t op) {
    switch (static_cast<CellKind>(request_.integer())) {
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

  template <typename T, CellKind kKind>
  void step(int64_t op) {
    const int64_t batch = request_.integer();
    const int64_t units = request_.integer();
    const int64_t blocks = batch * blocks_per_row(units);
    if (op == 1) {
      Advance<T> call{.units = units};
      call.from_x = matrix<const T>();
      call.from_h = matrix<const T>();
      call.active = column<const bool>();
      call.h = matrix<const T>();
      call.c = matrix<const T>();
      call.h_next = matrix<T>();
      call.c_next = matrix<T>();
      call.bias_x = column<const T>();
      call.bias_h = column<const T>();
      call.operand = any_matrix();
      call.output = any_matrix();
      call.kept = matrix<const bool>();
      call.scale = static_cast<T>(request_.number());
      device_.launch(rnn_advance_kernel<T, kKind>, blocks, kBlockSize, call);
    } else {
      Gradient<T> call{.units = units};
      Passing<T> passing{};
      call.d_out = matrix<const T>();
      call.pre = matrix<const T>();
      call.h = matrix<const T>();
      call.c = matrix<const T>();
      call.c_next = matrix<const T>();
      call.active = column<const bool>();
      passing.dh = matrix<T>();
      passing.dc = matrix<T>();
      call.d_x = matrix<T>();
      call.d_h = matrix<T>();
      const AnyMatrix operand = any_matrix();
      passing.product = matrix<const T>();
      passing.carry = {column<const T>(), of_type<const T>()};
      device_.launch(rnn_gradient_kernel<T, kKind>, blocks, kBlockSize, call, passing, operand);
    }
  }
};

}  // namespace

int main() { host_cuda::serve<Call>(); }
