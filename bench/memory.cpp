// Limits of a machine's memory: plain loops for the compiler to vectorise.

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace {
constexpr int kLanes = 64;  // independent sums, so that no addition waits for the one before
}

extern "C" {

// The sum of x [count].
float read_floats(const float* x, int64_t count, int threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    float lanes[kLanes] = {};
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin <= count - kLanes; begin += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[begin + lane];
    }
    for (float lane : lanes) total += lane;
  }
  for (int64_t i = count - count % kLanes; i < count; ++i) total += x[i];
  return total;
}

// x = 1 - x, in place, x [count].
void update_floats(float* x, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) x[i] = 1 - x[i];
}

// x = 1, x [count], past the caches where the processor can.
void write_floats(float* x, int64_t count, int threads) {
#if defined(__SSE2__)
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i <= count - 4; i += 4) _mm_stream_ps(x + i, _mm_set1_ps(1));
    _mm_sfence();
  }
  for (int64_t i = count - count % 4; i < count; ++i) x[i] = 1;
#else
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) x[i] = 1;
#endif
}

// y = x, both [count].
void copy_floats(float* y, const float* x, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) y[i] = x[i];
}

}  // extern "C"
