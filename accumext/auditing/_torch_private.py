"""The private attributes of torch that the auditor reads; no other file here reads any."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import _VF, Tensor, nn
from torch.amp import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# How often a tensor was written, also through views and under no_grad; not through `.data`.
write_count: Callable[[Any], int] = attrgetter("_version")

# The number of a node, which rises with each node that a thread makes.
order_of: Callable[[Any], int] = methodcaller("_sequence_nr")

# The scale on its device (the public `get_scale` waits for it); None before the first loss.
scale_tensor: Callable[[GradScaler], Tensor | None] = methodcaller("_get_scale_async")

# The functions that clip by a given norm; `clip_grad_norm_` calls them, too.
CLIPS: tuple[tuple[Any, str], ...] = (
    (nn.utils.clip_grad, "_clip_grads_with_norm_"),
    (nn.utils, "clip_grads_with_norm_"),
)

VF: Any = _VF
# What recurrent modules call, as attributes of `VF`; `batch_sizes` stand in a state's place.
RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh",
             "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell")  # fmt: skip


def is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether the tensor is one process's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Any) -> Tensor:
    """Return a DTensor's part on this process, without a copy: `to_local()` waits for others."""
    part: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return part


def in_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor has its elements: `fully_shard` frees gathered parameters."""
    part = local_part(tensor)
    return part.layout is not torch.strided or part.untyped_storage().size() > 0 or not part.numel()


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf to whose `.grad` a node adds; None for other nodes."""
    leaf: Tensor | None = node.variable if type(node).__name__ == "AccumulateGrad" else None
    return leaf


def saved_by(node: Any, name: str) -> Any:
    """Return what a node of the graph has saved under a name, unpacked; None if nothing."""
    return getattr(node, f"_saved_{name}", None)


def packed_by(node: Any, name: str) -> Any:
    """Return the same in the form that a hook on saved tensors gave it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return None if raw is None else raw.data


def is_being_made(schedule: Any) -> bool:
    """Tell whether the constructor of a learning-rate scheduler, which takes a step, still runs."""
    return getattr(schedule, "_step_count", 1) == 0


def runs_hooks(optimizer: Any) -> bool:
    """Tell whether `step` calls the hooks of torch: not if `Optimizer.__init__` never ran."""
    return bool(getattr(type(optimizer).step, "hooked", False))
