// Comes before everything else of a launcher that is compiled for the host: CUDA's execution model,
// and operators that are registered for, and find their tensors on, the CPU.
#pragma once

#include "instructions.h"
//
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#define CUDA CPU
#define aoti_torch_device_type_cuda aoti_torch_device_type_cpu
