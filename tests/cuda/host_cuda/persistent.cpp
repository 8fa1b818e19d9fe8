// Runs a window of decoder steps on the persistent kernel of csrc/cuda, on the host; see
// driver.cpp, and persistent.py for the request.
#include "instructions.h"
#include "request.h"
//
#include "cuda/decoder/persistent_plan.h"
#include "cuda/decoder/persistent_steps.cuh"

namespace {

using namespace accumext;
using namespace accumext::cuda;

class Call : public host_cuda::Run {
 public:
  using Run::Run;

  // The number of a run is how many blocks there are.
  void run() {
    const int64_t shared_bytes = request_.integer();
    const PersistentCall call = window();
    const PersistentPlan plan = persistent_plan(call, {.blocks = static_cast<int>(grid_),
                                                       .shared_bytes = shared_bytes,
                                                       .l2_bytes = 1 << 20,
                                                       .capability = 80});
    if (plan.blocks != grid_ || plan.shared_bytes > shared_bytes) {
      host_cuda::fail("the window does not fit", host_cuda::Site::current());
    }
    const bool resident = request_.integer() != 0;
    const int64_t stages = request_.integer();
    if (plan.resident != resident || (stages > 0 && plan.stages != stages)) {
      host_cuda::fail("the plan is another one", host_cuda::Site::current());
    }
    const host_cuda::Memory scratch(plan.scratch_bytes);
    std::fill_n(scratch.data(), plan.zeroed, std::byte{0});
    if (call.operand == Dtype::kHalf) {
      launch<__half>(call, plan, scratch.data());
    } else {
      launch<__nv_bfloat16>(call, plan, scratch.data());
    }
  }

 private:
  template <typename V>
  V* of_type() {
    return static_cast<V*>(pointer());
  }

  AnyMatrix any_matrix() {
    void* const data = pointer();
    const Dtype type = dtype();
    const int64_t row_stride = request_.integer();
    const int64_t column_stride = request_.integer();
    return {data, type, row_stride, column_stride};
  }

  AnyVector any_vector() {
    const void* const data = pointer();
    return {data, dtype()};
  }

  PersistentCall window() {
    PersistentCall call{};
    call.kind = static_cast<CellKind>(request_.integer());
    call.layers = static_cast<int>(request_.integer());
    for (int64_t* number : {&call.batch, &call.inputs, &call.units, &call.vocabulary, &call.steps,
                            &call.begin, &call.end, &call.eos, &call.pad, &call.table_rows}) {
      *number = request_.integer();
    }
    call.temperature = request_.number();
    call.dropout_scale = static_cast<float>(request_.number());
    call.table = any_matrix();
    for (PersistentLayer* layer = call.layer; layer < call.layer + call.layers; ++layer) {
      layer->weight_ih = any_matrix().as<const uint16_t>();
      layer->weight_hh = any_matrix().as<const uint16_t>();
      layer->bias_ih = any_vector();
      layer->bias_hh = any_vector();
      layer->h = of_type<float>();
      layer->c = of_type<float>();
    }
    call.dropout_mask = of_type<const bool>();
    call.inputs_fed = of_type<int64_t>();
    call.teacher = of_type<const int64_t>();
    call.teacher_mask = of_type<const bool>();
    call.active = of_type<bool>();
    call.uniforms = of_type<const double>();
    const AnyMatrix head = any_matrix();
    call.operand = head.dtype;
    call.head = head.as<const uint16_t>();
    call.head_bias = any_vector();
    call.targets = of_type<const int64_t>();
    call.tokens = of_type<int64_t>();
    call.exps = any_matrix();
    call.stats = any_matrix().as<float>();
    call.rows = of_type<int64_t>();
    return call;
  }

  template <typename T>
  void launch(const PersistentCall& call, const PersistentPlan& plan, std::byte* scratch) {
    switch (plan.width / kTileRows) {
      case 1:
        return launch(persistent_steps_kernel<T, 1>, call, plan, scratch);
      case 2:
        return launch(persistent_steps_kernel<T, 2>, call, plan, scratch);
      default:
        return launch(persistent_steps_kernel<T, 4>, call, plan, scratch);
    }
  }

  void launch(void (*kernel)(PersistentCall, PersistentPlan, std::byte*),
              const PersistentCall& call, const PersistentPlan& plan, std::byte* scratch) {
    device_.launch_together(kernel, plan.blocks, kBlockSize, plan.shared_bytes, call, plan,
                            scratch);
  }
};

}  // namespace

int main() { host_cuda::serve<Call>(); }
