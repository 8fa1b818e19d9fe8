#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>

#include "common/arguments.h"

namespace accumext::cpu {
namespace {

// A hint: if the system has no large pages, or has used them up, nothing happens.
void large_pages_cpu(Tensor memory) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLargePage = 2 << 20;  // bytes
  const auto begin = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  const uintptr_t end = begin + memory.numel() * static_cast<int64_t>(memory.element_size());
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = end / page * page;
  if (last >= first + 2 * kLargePage) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
}

}  // namespace
}  // namespace accumext::cpu

STABLE_TORCH_LIBRARY_IMPL(accumext, CPU, m) {
  m.impl("large_pages", accumext::boxed<accumext::cpu::large_pages_cpu>);
}
