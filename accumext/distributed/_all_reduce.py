"""Sums of tensors over processes in buckets, also while a backward pass still makes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumext import ops
from accumext.tensors import checks
from accumext.tensors.kinds import Group, dense_storage, is_dtensor, main_dtype
from accumext.tensors.scalars import Scalar, sent, to_device
from accumext.tensors.torch_private import (
    cancel_synchronisation,
    synchronises_first_pass,
    zero_all_,
)

# The bucket size of DistributedDataParallel: enough for full bandwidth, and little enough
# that it overlaps with filling the next bucket, or with the backward pass.
BUCKET_BYTES = 25 * 2**20

ALIGNMENT = 16  # elements; where gradients begin, for aligned vector loads


def no_sync(
    op: str, model: object, group: Group | None
) -> tuple[AbstractContextManager[None], Group | None]:
    """Return a context in which DistributedDataParallel does not synchronise, and the group over
    which gradients are then to be summed. `ShardedWindow` does so for `fully_shard`."""
    if not (model is None or isinstance(model, nn.Module)):
        got = checks.type_name(model)
        checks.fail_type(op, "model", "be a torch.nn.Module or None", got)
    modules = [] if model is None else list(model.modules())
    replicas = [m for m in modules if isinstance(m, DistributedDataParallel)]
    others = [m for m in modules if not isinstance(m, DistributedDataParallel)]
    if any(hasattr(type(m), "no_sync") for m in others):  # wrappers may forward what is DDP's
        contract = "be a DistributedDataParallel or fully_shard model, or a plain module"
        advice = "Its sharded gradients carry no mesh, so their norm is unknown: use fully_shard"
        checks.fail_type(op, "model", contract, checks.type_name(model), advice)
    groups = [replica.process_group for replica in replicas]
    if group is None and any(other is not groups[0] for other in groups):
        contract = "have DistributedDataParallel parts of one process group"
        advice = "Give each part an optimizer of its own, or pass process_group"
        checks.fail_value(op, "model", contract, "several", advice)
    if any(map(synchronises_first_pass, replicas)):
        contract = "be DistributedDataParallel without static_graph=True"
        advice = "Leave it out: no backward pass inside is synchronised"
        checks.fail_value(op, "model", contract, "one whose first pass is to come", advice)
    return _no_sync_of(replicas), group or (groups[0] if groups else None)


@contextmanager
def _no_sync_of(replicas: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """None of the replicas synchronises, not even after a forward pass outside."""
    with ExitStack() as held:
        for replica in replicas:
            cancel_synchronisation(replica)
            held.enter_context(replica.no_sync())
        yield


class Bucket:
    """Sums of some parameters in one flat tensor, and word of who has which.

    Every process sends every parameter, so that the calls match: zeros for a missing gradient, a
    sparse one dense. At the end of the tensor stand, for each parameter, how many processes have a
    dense gradient, how many a sparse one, and the sum of sparse dimensions over the latter.
    """

    def __init__(self, indices: list[int], parameters: Sequence[Tensor]) -> None:
        self.indices = indices
        self.parameters = [parameters[i] for i in indices]
        # Whose gradients may still change: hooks tell when they are complete.
        self.awaited = {
            i for i in indices if parameters[i].requires_grad or parameters[i].grad is not None
        }
        self._ordinary = True  # this process has a dense gradient for each parameter

    def send(self, sums: list[Tensor | None], factor: Scalar, group: Group) -> None:
        """Begin to sum `sums * factor` over the group; the list does not keep what is sent."""
        likes, device = list(map(_like, self.parameters)), self.parameters[0].device
        sizes = [-(-like.numel() // ALIGNMENT) * ALIGNMENT for like in likes]
        *begins, end = accumulate(sizes, initial=0)
        size, dtype = end + 3 * len(likes), main_dtype(likes[0])
        self._flat = flat = torch.empty(size, dtype=dtype, device=device)
        self._presence = flat[end:].view(3, -1)
        parts = list(zip(likes, begins, sizes, strict=True))
        self._views = [flat.as_strided(like.shape, like.stride(), b) for like, b, _ in parts]
        gaps = [flat[b + like.numel() : b + size] for like, b, size in parts if like.numel() < size]
        zero_all_([self._presence, *gaps])  # they travel too, and nobody may find NaN in them
        self._presence[0] = 1.0
        there, sources = [], []
        for i, (index, view) in enumerate(zip(self.indices, self._views, strict=True)):
            main = sums[index]
            if main is None or main.is_sparse:
                self._ordinary = False
                self._presence[0, i] = 0.0  # by number: no copy from the host waits for a GPU
            if main is None:
                view.zero_()
                continue
            if main.is_sparse:
                self._presence[1, i], self._presence[2, i] = 1.0, float(main.sparse_dim())
                main = main.to_dense()
            there.append(view)
            sources.append(sent(dense_storage(main), device))
        ops.accumulate_(there, sources, inv_scale=to_device(device, factor), overwrite=True)
        for index in self.indices:
            sums[index] = None
        self._work = dist.all_reduce(flat, group=group, async_op=True)

    def receive(self, sums: list[Tensor | None]) -> None:
        """Put the sums of all processes there: none where nobody has a gradient, dense ones where
        any is. Only a process that lacks one, or has a sparse one, reads what the others have."""
        self._work.wait()
        dense_alone = [(1.0, 0.0, 0.0)] * len(self._views)
        rows = dense_alone if self._ordinary else self._presence.T.tolist()
        parts = zip(self.indices, self.parameters, self._views, rows, strict=True)
        for i, parameter, main, (dense, sparse, sparse_dims) in parts:
            if is_dtensor(parameter):
                whole = torch.zeros_like(parameter, dtype=main_dtype(parameter)).detach()
                dense_storage(whole).copy_(main)
                main = whole
            elif parameter.is_complex():
                main = torch.view_as_complex(main)
            if dense or sparse:
                sums[i] = main if dense else main.to_sparse(round(sparse_dims / sparse))


class AllReduceInBuckets:
    """The sum of tensors, some of them missing, over a group of processes."""

    def __init__(self, parameters: Sequence[Tensor], indices: Sequence[int], group: Group) -> None:
        self._group, self._parameters = group, parameters
        self._buckets = plan_buckets(parameters, indices)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        self._sent = 0  # buckets; all processes send them in one order

    def send_complete(
        self, op: str, sums: list[Tensor | None], factor: Scalar, indices: Iterable[int]
    ) -> None:
        """Send what can be sent as soon as these parameters have their last gradient."""
        for i in indices:
            awaited = self._bucket_of[i].awaited
            if i not in awaited:
                contract = "be complete when autograd has accumulated it"
                got = "one in several parts, as reentrant checkpoints make them"
                advice = "Use reduce_in_backward=False"
                raise RuntimeError(checks.message(op, ".grad", contract, got, advice))
            awaited.remove(i)
        # The last one stays: while it does, `abandon` can still tell the others.
        while self._sent < len(self._buckets) - 1 and not self._buckets[self._sent].awaited:
            self._buckets[self._sent].send(sums, factor, self._group)
            self._sent += 1

    def finish(self, sums: list[Tensor | None], factor: Scalar) -> None:
        """Send the rest, and put what arrives into the list: the sums of all processes."""
        for bucket in self._buckets[self._sent :]:
            bucket.send(sums, factor, self._group)
        for bucket in self._buckets:
            bucket.receive(sums)

    def abandon(self) -> None:
        """Let the sum arrive on the other processes, not finite, so that they skip the window."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for i in self._buckets[-1].indices if self._buckets else ():
            parameter = self._parameters[i]
            sums[i] = torch.full_like(_like(parameter), math.nan, device=parameter.device)
        try:
            self.finish(sums, 1.0)
        except torch.OutOfMemoryError:  # the others wait
            raise
        except RuntimeError:  # those that are gone need nothing
            pass


def plan_buckets(parameters: Sequence[Tensor], indices: Sequence[int]) -> list[Bucket]:
    """Buckets of one device and dtype each, the last parameters first: so backward makes them."""
    planned: list[list[int]] = []
    filling: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for i in reversed(indices):
        like = _like(parameters[i])
        kind = parameters[i].device, main_dtype(like)
        members, size = filling.pop(kind, ([], 0))
        members.append(i)
        size += like.numel() * kind[1].itemsize
        if size >= BUCKET_BYTES:
            planned.append(members)
        else:
            filling[kind] = members, size
    planned += [members for members, _ in filling.values()]
    return [Bucket(members, parameters) for members in planned]


def _like(parameter: Tensor) -> Tensor:
    """Return a tensor laid out as a parameter's dense sum is here, without gaps; its dtype and
    device may differ."""
    like = dense_storage(parameter.detach())
    return like if like.is_contiguous() else torch.empty_like(like, device="meta")
