// Comes before everything else of a launcher that is compiled for the host: CUDA's execution model,
// operators that are registered for, and find their tensors on, the CPU, and torch.cpp in place of
// what torch has of a GPU.
#pragma once

#include "instructions.h"

#define aoti_torch_create_device_guard host_create_device_guard
#define aoti_torch_create_tensor_from_blob host_create_tensor_from_blob
#define aoti_torch_delete_device_guard host_delete_device_guard
#define aoti_torch_get_data_ptr host_get_data_ptr
#define aoti_torch_get_device_index host_get_device_index
#define torch_call_dispatcher host_call_dispatcher
//
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#define aoti_torch_device_type_cuda aoti_torch_device_type_cpu
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(library, key, m) \
  _STABLE_TORCH_LIBRARY_IMPL(library, CPU, m, C10_UID)
