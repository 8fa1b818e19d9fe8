"""What the auditor reads of torch that torch does not promise; no other file here reads any."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._pytree import tree_map_only as tree_map_only

# How often a tensor was written, also through views and under no_grad; not through `.data`.
write_count: Callable[[Any], int] = attrgetter("_version")

# Of nodes that one thread has made, these rise.
order_of: Callable[[Any], int] = methodcaller("_sequence_nr")

# The scale on its device, where the public `get_scale` waits for that; None before the first loss.
scale_tensor: Callable[[GradScaler], Tensor | None] = methodcaller("_get_scale_async")

# The functions that clip by a norm that is known, through which `clip_grad_norm_` goes, too.
CLIPS: tuple[tuple[Any, str], ...] = (
    (nn.utils.clip_grad, "_clip_grads_with_norm_"),
    (nn.utils, "clip_grads_with_norm_"),
)


def is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether the tensor is one process's view of a distributed one."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Any) -> Tensor:
    """What a process has of a DTensor, in the same memory: `to_local()` waits for collectives."""
    part: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return part


def leaf_of(node: Any) -> Tensor | None:
    """The leaf to whose `.grad` a node adds; None for other nodes."""
    leaf: Tensor | None = node.variable if type(node).__name__ == "AccumulateGrad" else None
    return leaf


def saved_by(node: Any, name: str) -> Any:
    """What a node of the graph has saved under a name, unpacked; None if nothing."""
    return getattr(node, f"_saved_{name}", None)


def packed_by(node: Any, name: str) -> Any:
    """The same as a hook on saved tensors made it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return None if raw is None else raw.data


def is_being_made(schedule: Any) -> bool:
    """Tell whether the constructor of a learning-rate scheduler, which takes a step, still runs."""
    return getattr(schedule, "_step_count", 1) == 0


def runs_hooks(optimizer: Any) -> bool:
    """Tell whether `step` calls the hooks of torch: not where `Optimizer.__init__` never ran."""
    return bool(getattr(type(optimizer).step, "hooked", False))
