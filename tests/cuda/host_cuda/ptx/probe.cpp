// Runs the kernel `probe` that is linked to this, a warp of it, and prints 64 numbers that it got.
#include "simt.h"

extern "C" __global__ void probe(uint64_t*) {}

int main() {
  const auto numbers = std::make_unique<uint64_t[]>(64);
  host_cuda::Device device;
  device.launch(probe, 1, 32, numbers.get());
  for (int i = 0; i < 64; ++i) std::printf("%llu\n", static_cast<unsigned long long>(numbers[i]));
}
