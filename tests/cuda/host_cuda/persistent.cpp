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
  void run(std::string_view) {
    int64_t shared_bytes, stages;
    bool resident;
    read(shared_bytes, resident, stages);
    const PersistentCall call = window();
    const PersistentPlan plan = persistent_plan(call, {.blocks = static_cast<int>(grid_),
                                                       .shared_bytes = shared_bytes,
                                                       .l2_bytes = 1 << 20,
                                                       .capability = 80});
    if (plan.blocks != grid_ || plan.shared_bytes > shared_bytes) {
      host_cuda::fail("the window does not fit", host_cuda::Site::current());
    }
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
  PersistentCall window() {
    PersistentCall call{};
    AnyMatrix head;
    read(call.kind, call.layers, call.batch, call.inputs, call.units, call.vocabulary, call.steps,
         call.begin, call.end, call.eos, call.pad, call.table_rows, call.temperature,
         call.dropout_scale, call.table);
    for (PersistentLayer* layer = call.layer; layer < call.layer + call.layers; ++layer) {
      read(layer->weight_ih, layer->weight_hh, layer->bias_ih, layer->bias_hh, layer->h, layer->c);
    }
    read(call.dropout_mask, call.inputs_fed, call.teacher, call.teacher_mask, call.active,
         call.uniforms, head, call.head_bias, call.targets, call.tokens, call.exps, call.stats,
         call.rows);
    call.operand = head.dtype;
    call.head = head.as<const uint16_t>();
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

int main(int, char** arguments) { host_cuda::serve<Call>(arguments[1]); }
