// The kernel that ends rows after the tokens of a step.
#pragma once

#include <cstdint>

#include "cuda/decoder/matrix.h"
#include "cuda/device.cuh"

namespace accumext::cuda {

// end_rows in accumext/generation/_stepper.py says what each argument is.
struct EndRows {
  int64_t rows;
  Column<const int64_t> tokens;
  Column<const bool> active;
  Column<const int64_t> limits;
  int64_t step, eos, pad;
  Column<bool> next_active;
  Column<int64_t> inputs;
};

// Writes which rows stay active, and what they read next.
//
//   grid    rows / kBlockSize, rounded up      block   kBlockSize threads, one for each row
//   reads   tokens, int64, active, bool, and limits, int64, [rows]
//   writes  next_active, bool, and inputs, int64, [rows]
__global__ void __launch_bounds__(kBlockSize) end_rows_kernel(EndRows call) {
  const int64_t row = int64_t{blockIdx.x} * kBlockSize + threadIdx.x;
  if (row >= call.rows) return;
  const int64_t token = call.tokens[row];
  const bool goes_on = call.active[row] && call.limits[row] > call.step + 1 && token != call.eos;
  call.next_active[row] = goes_on;
  call.inputs[row] = goes_on ? token : call.pad;
}

}  // namespace accumext::cuda
