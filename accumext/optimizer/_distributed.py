"""Several processes: whose synchronisation to hold back, and weights of sharded micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accumext import _checks
from accumext._tensor_kinds import Group as Group


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

    Nothing of FSDP (fully_shard): with synchronize="window" it is ShardedWindow that does so.
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
