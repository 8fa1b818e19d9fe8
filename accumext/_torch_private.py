"""The names of torch that are not public: each with what it is needed for.

A release of torch may change any of them, so no other file reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# The imports above: recurrent states nest tensors in tuples, lists and dicts, and torch has no
# public functions for that (`torch.utils.pytree` does not exist in every supported release).

# --- tensors --------------------------------------------------------------------------------------

# The counter of in-place writes, with which autograd refuses a saved tensor that has changed: the
# decoder reads parameters again in its backward pass without saving them.
write_count: Callable[[Tensor], int] = attrgetter("_version")

# --- modules --------------------------------------------------------------------------------------

# Hooks of a module whose forward the decoder computes from the weights: it cannot call them.
forward_hooks: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks"
)
backward_hooks: Callable[[nn.Module], tuple[Any, ...]] = attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)

# --- processors -----------------------------------------------------------------------------------


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has AVX512-BF16: `torch.backends.cpu` tells AVX-512, not this part of it."""
    return torch.cpu._is_avx512_bf16_supported()
