// Runs the kernel `probe` that is linked to this, a warp of it, on a number; prints what it leaves.
#include "simt.cpp"

extern "C" __global__ void probe(uint64_t*) {}

int main(int, char** arguments) {
  const auto number = std::make_unique<uint64_t>(std::stoi(arguments[1]));
  host_cuda::Device device;
  device.launch(probe, 1, 32, number.get());
  std::printf("%llu\n", static_cast<unsigned long long>(*number));
}
