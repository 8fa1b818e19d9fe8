"""Several processes: whose synchronisation to hold back, and norms of sharded gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumext import _checks, ops, reference
from accumext._gradients import is_dtensor, plain, settled
from accumext._numbers import Scalar, as_tensor, known, on

Group: TypeAlias = "dist.ProcessGroup"


def check_group(op: str, group: object) -> Group | None:
    """A process group, or None."""
    if group is None:
        return None
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        got = _checks.type_name(group)
        _checks.fail_type(op, "process_group", "be a torch.distributed process group or None", got)
    return group


def packed_group(op: str, group: Group | None) -> str | None:
    """The group as a pickle or copy can hold it: the default one, or none."""
    if group is None:
        return None
    if group is not dist.group.WORLD:
        contract = "be the default group to be copied or pickled"
        raise RuntimeError(_checks.message(op, "process_group", contract, "another"))
    return "default"


def unpacked_group(packed: str | None) -> Group | None:
    """The group of the process that unpickles."""
    return None if packed is None else dist.group.WORLD


def hold_back(
    op: str, model: object, group: Group | None
) -> tuple[AbstractContextManager[None], Group | None]:
    """A context in which the model does not synchronise, and the group its gradients then need.

    FSDP (fully_shard) goes on reducing: a gradient held back there exists only inside FSDP, in full
    size, until a later backward reduces it, so it could be neither taken in nor stepped on.
    """
    if model is None:
        return nullcontext(), group
    if not isinstance(model, nn.Module):
        got = _checks.type_name(model)
        _checks.fail_type(op, "model", "be a torch.nn.Module or None", got)
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    others = [m for m in model.modules() if not isinstance(m, DistributedDataParallel)]
    if any(hasattr(type(m), "no_sync") for m in others):  # wrappers may forward what is DDP's
        contract = "be a DistributedDataParallel or fully_shard model, or a plain module"
        advice = "Its sharded gradients carry no mesh, so their norm is unknown: use fully_shard"
        _checks.fail_type(op, "model", contract, _checks.type_name(model), advice)
    groups = [replica.process_group for replica in replicas]
    if group is None and any(other is not groups[0] for other in groups):
        contract = "have DistributedDataParallel parts of one process group"
        advice = "Give each part an optimizer of its own, or pass process_group"
        _checks.fail_value(op, "model", contract, "several", advice)
    return _no_sync(replicas), group or (groups[0] if groups else None)


@contextmanager
def _no_sync(replicas: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """None of the replicas synchronises."""
    with ExitStack() as held:
        for replica in replicas:
            held.enter_context(replica.no_sync())
        yield


def shared_weight(weight: Scalar, parameters: Sequence[Tensor]) -> tuple[Scalar, Scalar]:
    """The weight of a micro-batch whose gradients are averaged over processes in the backward pass.

    Each then holds a part of the same average, so they must count it alike: with their mean weight.
    What a process's own loss has to be multiplied with makes the average a weighted one.

    Returns:
        factor of the loss, weight to count; `(1.0, weight)` where no parameter is sharded.
    """
    sharded = next(filter(is_dtensor, parameters), None)
    if sharded is None:
        return 1.0, weight
    mesh = sharded.device_mesh  # type: ignore[attr-defined]
    total = as_tensor(weight, torch.float64, sharded.device).clone()
    for dimension in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(dimension))
    mean = known(total / mesh.size())
    if isinstance(mean, Tensor):
        return weight / torch.where(mean > 0, mean, 1.0), mean
    return weight / (mean or 1.0), mean


def total_norm(
    grads: Sequence[Tensor],
    *,
    norm_type: float,
    inv_scale: Scalar = 1.0,
    found_inf: Tensor,  # []; set to 1.0 where a gradient is not finite, on all processes alike
) -> Tensor:  # []
    """The norm of `grads * inv_scale` as one vector, whatever devices and processes hold them."""
    parts: dict[tuple[torch.device, tuple[Group, ...]], list[Tensor]] = {}
    for grad in grads:
        parts.setdefault((grad.device, _shard_groups(grad)), []).append(plain(grad))
    norms = []
    for (device, groups), tensors in parts.items():
        flag = torch.zeros_like(found_inf, device=device)
        factor = on(device, inv_scale)
        norm = ops.total_norm(tensors, norm_type=norm_type, inv_scale=factor, found_inf=flag)
        if groups and norm_type < 0 and not any(tensor.numel() for tensor in tensors):
            norm = torch.full_like(norm, math.inf)  # of no elements, where the least one counts
        for group in groups:
            norm = _norm_over(group, norm, norm_type)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))
        norms.append(norm.to(found_inf.device, non_blocking=True))
    return norms[0] if len(norms) == 1 else ops.total_norm(norms, norm_type=norm_type)


def nonzero_tensors(grads: Sequence[Tensor]) -> Tensor:  # []
    """How many gradients are not all zero: the 0-norm of their 0-norms."""
    parts: dict[tuple[torch.device, tuple[Group, ...]], list[Tensor]] = {}
    for grad in map(settled, grads):
        part = parts.setdefault((grad.device, _shard_groups(grad)), [])
        part.append((plain(grad) != 0).any())
    dtype = reference.accumulation_dtype(*grads)
    count = torch.zeros((), dtype=dtype, device=grads[0].device if grads else None)
    for (_, groups), flags in parts.items():
        nonzero = torch.stack(flags).to(dtype)
        for group in groups:
            dist.all_reduce(nonzero, op=dist.ReduceOp.MAX, group=group)
        count += nonzero.sum().to(count.device)
    return count


def _shard_groups(tensor: Any) -> tuple[Group, ...]:
    """The groups over which a DTensor is split; none for any other tensor."""
    if not is_dtensor(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())


def _norm_over(group: Group, norm: Tensor, norm_type: float) -> Tensor:
    """The norm of a vector split over a group, from the norms of its parts."""
    if math.isinf(norm_type):
        op = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
        dist.all_reduce(norm, op=op, group=group)
        return norm
    total = norm.double() ** norm_type
    dist.all_reduce(total, group=group)
    return (total ** (1.0 / norm_type)).to(norm.dtype)
