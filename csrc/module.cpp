// Python bindings of functions without tensors, for tests and experiments: the chunk planner, and
// the instruction set that the CPU kernels choose. It is not installed; compile it with
// torch.utils.cpp_extension.load(**accumext.backends.load_arguments("bind")).

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "common/chunks.h"
#include "cpu/simd/isa.h"

namespace py = pybind11;

namespace {

std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> PlanChunks(
    const std::vector<std::int64_t>& numels, std::int64_t chunk_size) {
  if (chunk_size < 1) {
    throw py::value_error("plan_chunks: chunk_size must be at least 1, got " +
                          std::to_string(chunk_size));
  }
  std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> result;
  for (const accumext::Chunk& chunk : accumext::plan_chunks(numels, chunk_size)) {
    result.emplace_back(chunk.tensor, chunk.begin, chunk.end);
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The chunk planner, and the instruction set of the CPU kernels.";
  m.def(
      "instruction_set", [] { return accumext::isa_name(accumext::widest_isa()); },
      "\"portable\", \"AVX2\" or \"AVX-512\".");
  m.def("plan_chunks", &PlanChunks, py::arg("numels"), py::arg("chunk_size"),
        "Chunks (tensor, begin, end) of a list of tensors with these element counts.");
}
