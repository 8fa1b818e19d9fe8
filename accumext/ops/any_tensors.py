"""The operators on gradients of every kind (sharded, sparse, complex), on any devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accumext import ops
from accumext.ops import reference
from accumext.tensors.kinds import Group, coalesced, dense_storage, fit_one_call, is_dtensor
from accumext.tensors.scalars import Scalar, sent, to_device


def group_by_device(
    *lists: list[Tensor], one_call: bool = False
) -> list[tuple[torch.device, list[list[Tensor]]]]:
    """Split lists of equal length into operator calls: (device, lists of dense real tensors) each.

    Args:
        lists: `lists[k][i]` for all k go into one call together.
        one_call: whether `fit_one_call` is known to be true.
    """
    if one_call or fit_one_call(list(chain(*lists))):
        return [(lists[0][0].device, list(lists))] if lists[0] else []
    calls: dict[torch.device, list[list[Tensor]]] = {}
    for together in zip(*lists, strict=True):
        call = calls.setdefault(together[0].device, [[] for _ in together])
        for operand, tensor in zip(call, together, strict=True):
            operand.append(dense_storage(tensor))
    return list(calls.items())


def scale_(tensors: list[Tensor], factor: Scalar, one_call: bool = False) -> None:
    """Multiply in place, on any devices; the host number 1.0 costs nothing."""
    if tensors and (isinstance(factor, Tensor) or factor != 1.0):
        for device, (mine,) in group_by_device(tensors, one_call=one_call):
            ops.scale_(mine, to_device(device, factor))


def global_norm(
    grads: Sequence[Tensor],
    *,
    norm_type: float,
    inv_scale: Scalar = 1.0,
    found_inf: Tensor,  # []; set to 1.0 if a gradient is not finite, on all processes alike
) -> Tensor:  # []
    """Return the norm of `grads * inv_scale` as one vector, on any devices and processes."""
    if grads and found_inf.device == grads[0].device and fit_one_call(grads):
        factor = to_device(found_inf.device, inv_scale)
        return ops.total_norm(grads, norm_type=norm_type, inv_scale=factor, found_inf=found_inf)
    norms = []
    for (device, groups), tensors in _by_device_and_groups(grads).items():
        flag = torch.zeros_like(found_inf, device=device)
        factor = to_device(device, inv_scale)
        norm = ops.total_norm(tensors, norm_type=norm_type, inv_scale=factor, found_inf=flag)
        if groups and norm_type < 0 and not any(tensor.numel() for tensor in tensors):
            norm = torch.full_like(norm, math.inf)  # no elements: neutral for the smallest one
        for group in groups:
            norm, flag = _norm_over(group, norm, flag, norm_type)
        found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))
        norms.append(sent(norm, found_inf.device))
    return norms[0] if len(norms) == 1 else ops.total_norm(norms, norm_type=norm_type)


def count_nonzero(grads: Sequence[Tensor]) -> Tensor:  # []
    """Return the number of gradients that are not all zero: the 0-norm of their 0-norms."""
    dtype = reference.accumulation_dtype(*grads)
    count = torch.zeros((), dtype=dtype, device=grads[0].device if grads else "cpu")
    for (_, groups), tensors in _by_device_and_groups(map(coalesced, grads)).items():
        nonzero = torch.stack([(tensor != 0).any() for tensor in tensors]).to(dtype)
        for group in groups:
            dist.all_reduce(nonzero, op=dist.ReduceOp.MAX, group=group)
        count += nonzero.sum().to(count.device)
    return count


def _by_device_and_groups(
    grads: Iterable[Tensor],
) -> dict[tuple[torch.device, tuple[Group, ...]], list[Tensor]]:
    """Return dense real tensors by their device and the groups over which they are split."""
    parts: dict[tuple[torch.device, tuple[Group, ...]], list[Tensor]] = {}
    for grad in grads:
        parts.setdefault((grad.device, _shard_groups(grad)), []).append(dense_storage(grad))
    return parts


def _shard_groups(tensor: Any) -> tuple[Group, ...]:
    """Return the groups over which a DTensor is split; none for any other tensor."""
    if not is_dtensor(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())


def _norm_over(group: Group, norm: Tensor, flag: Tensor, norm_type: float) -> tuple[Tensor, Tensor]:
    """Return the norm of a vector split over a group, and its found_inf, from those of its parts.

    One all-reduce sends both numbers, which takes no longer than one number.
    """
    if math.isinf(norm_type):
        sign = math.copysign(1.0, norm_type)
        both = torch.stack([norm.double() * sign, flag.double()])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        return (both[0] * sign).to(norm.dtype), both[1].to(flag.dtype)
    both = torch.stack([norm.double() ** norm_type, flag.double()])
    dist.all_reduce(both, group=group)
    found_inf = (both[1] != 0).to(flag.dtype)
    return (both[0] ** (1.0 / norm_type)).to(norm.dtype), found_inf
