// A heap on which nothing that was not written can pass for a number: to be preloaded. Every block
// comes filled with words FILL, and is filled with them again when it is given back. Bytes 0xFF are
// NaN in each floating-point type, -1 as an integer, and true.
//
// In front of glibc's allocator, under which torch, its libraries and operator new lie.
// MALLOC_PERTURB_ would leave out the small blocks that glibc keeps per thread, and has no byte
// that makes NaN of new ones.
#include <malloc.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

extern "C" {

void* __libc_malloc(size_t size);
void* __libc_memalign(size_t alignment, size_t size);
void* __libc_realloc(void* block, size_t size);
void __libc_free(void* block);

// Whole words, as glibc's blocks begin and end with one; a block that grew may not.
static void fill(char* begin, char* end) {
  const auto up = [](char* at) { return (reinterpret_cast<uintptr_t>(at) + 3) & ~uintptr_t{3}; };
  std::fill(reinterpret_cast<uint32_t*>(up(begin)), reinterpret_cast<uint32_t*>(end), FILL);
}

static void* filled(void* block) {
  char* const begin = static_cast<char*>(block);
  if (block != nullptr) fill(begin, begin + malloc_usable_size(block));
  return block;
}

void* malloc(size_t size) noexcept { return filled(__libc_malloc(size)); }

void* memalign(size_t alignment, size_t size) noexcept {
  return filled(__libc_memalign(alignment, size));
}

void* aligned_alloc(size_t alignment, size_t size) noexcept { return memalign(alignment, size); }

int posix_memalign(void** block, size_t alignment, size_t size) noexcept {
  if (alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0) {
    return EINVAL;
  }
  void* const found = memalign(alignment, size);
  if (found == nullptr) return ENOMEM;
  *block = found;
  return 0;
}

void* realloc(void* block, size_t size) noexcept {
  const size_t before = block == nullptr ? 0 : malloc_usable_size(block);
  void* const moved = __libc_realloc(block, size);
  if (moved == nullptr) return nullptr;
  const size_t after = malloc_usable_size(moved);
  char* const begin = static_cast<char*>(moved);
  if (after > before) fill(begin + before, begin + after);
  return moved;
}

void free(void* block) noexcept { __libc_free(filled(block)); }

#if defined(__x86_64__)
// Tells whether this thread has computed with a subnormal number since it was last asked.
bool subnormal_operands() {
  const unsigned flags = _mm_getcsr();
  _mm_setcsr(flags & ~_MM_EXCEPT_DENORM);
  return (flags & _MM_EXCEPT_DENORM) != 0;
}
#endif

}  // extern "C"
