// One fault of each kind, by which the tests know that the sanitizers see them.
#include <cstdint>
#include <cstdlib>

extern "C" {

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                           void (*body)(int64_t, int64_t, void*), void* context);

int none() { return 0; }

int use_after_free() {
  int* volatile memory = new int(7);
  delete memory;
  return *memory;
}

int beyond_the_buffer() {
  int* volatile memory = new int[4]();
  const int value = memory[4];
  delete[] memory;
  return value;
}

int overflow() {
  volatile int64_t number = INT64_MAX;
  number = number + 1;
  return number > 0;
}

int race() {
  int64_t sum = 0;
  torch_parallel_for(
      0, 100, 1,
      [](int64_t begin, int64_t end, void* total) {
        for (int64_t i = begin; i < end; ++i) *static_cast<int64_t*>(total) += i;
      },
      &sum);
  return static_cast<int>(sum);
}
}
