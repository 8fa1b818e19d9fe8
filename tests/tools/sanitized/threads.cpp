// torch's parallel_for on threads that ThreadSanitizer knows: those of libgomp, which is not built
// for it, meet at barriers that it cannot see, and every loop would look like a race. Preloaded,
// this one takes its place. It shares the work as finely as it can, so that whatever may race does.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t /*grain_size*/,
                                      void (*body)(int64_t, int64_t, void*), void* context) {
  constexpr int64_t kThreads = 4;
  const int64_t share = std::max<int64_t>((end - begin + kThreads - 1) / kThreads, 1);
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += share) {
    threads.emplace_back(body, first, std::min(end, first + share), context);
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}
