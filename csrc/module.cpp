// Python bindings of what needs no tensor: facts about the build and the processor, and the chunk
// planner.
// No torch header is included, so the module depends on the Python version only.

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

std::string Compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

py::dict BuildFacts() {
  py::dict facts;
  facts["compiler"] = Compiler();
  facts["cplusplus"] = static_cast<std::int64_t>(__cplusplus);
  facts["python"] = PY_VERSION;
  facts["instruction_set"] = accumext::isa_name(accumext::widest_isa());
  return facts;
}

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
  m.doc() = "Facts about the build, and the chunk planner.";
  m.def("build_facts", &BuildFacts,
        "Compiler, C++ standard and Python of this build; instruction set of the CPU kernels.");
  m.def("plan_chunks", &PlanChunks, py::arg("numels"), py::arg("chunk_size"),
        "Chunks (tensor, begin, end) of a list of tensors with these element counts.");
}
