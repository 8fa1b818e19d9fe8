"""Sums of tensors over processes in buckets, also while a backward pass still computes them."""

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
from accumext.tensors.torch_private import zero_all_
from accumext.tensors.torch_private_distributed import (
    cancel_synchronisation,
    synchronises_first_pass,
)

# The bucket size of DistributedDataParallel: large enough for full bandwidth, and small enough that
# sending a bucket overlaps with filling the next one, or with the backward pass.
BUCKET_BYTES = 25 * 2**20

ALIGNMENT = 16  # elements; gradients begin at multiples of it, for aligned vector loads


def no_sync(
    op: str, model: object, group: Group | None
) -> tuple[AbstractContextManager[None], Group | None]:
    """Return a context in which DistributedDataParallel does not synchronise, and the group over
    which gradients are then to be summed. For `fully_shard`, see `ShardedWindow.holding`."""
    if not (model is None or isinstance(model, nn.Module)):
        got = checks.type_name(model)
        checks.fail_type(op, "model", "be a torch.nn.Module or None", got)
    modules = [] if model is None else list(model.modules())
    replicas = [m for m in modules if isinstance(m, DistributedDataParallel)]
    others = [m for m in modules if not isinstance(m, DistributedDataParallel)]
    if any(hasattr(type(m), "no_sync") for m in others):  # on objects, wrappers may forward DDP's
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
    """Keep replicas from synchronising, also after a forward pass that preceded this context."""
    with ExitStack() as held:
        for replica in replicas:
            cancel_synchronisation(replica)
            held.enter_context(replica.no_sync())
        yield


class Bucket:
    """Sums of some parameters in one flat tensor, and counts of the processes that have a gradient.

    Every process sends every parameter, so that the calls match: zeros for a missing gradient, a
    sparse one as dense. At the end of the tensor are, for each parameter, the number of processes
    with a dense gradient, the number with a sparse one, and the sum of the latter's sparse
    dimensions.
    """

    def __init__(self, indices: list[int], parameters: Sequence[Tensor]) -> None:
        self.indices = indices
        self.parameters = [parameters[i] for i in indices]
        # Parameters whose gradients may still change: hooks tell when they are complete.
        self.awaited = {
            i for i in indices if parameters[i].requires_grad or parameters[i].grad is not None
        }
        self._ordinary = True  # this process has a dense gradient for each parameter

    def send(self, sums: list[Tensor | None], factor: Scalar, group: Group) -> None:
        """Begin to sum `sums * factor` over the group. Sent entries of the list become None, which
        frees their memory."""
        likes, device = list(map(_like, self.parameters)), self.parameters[0].device
        sizes = [-(-like.numel() // ALIGNMENT) * ALIGNMENT for like in likes]
        *begins, end = accumulate(sizes, initial=0)
        size, dtype = end + 3 * len(likes), main_dtype(likes[0])
        self._flat = flat = torch.empty(size, dtype=dtype, device=device)
        self._presence = flat[end:].view(3, -1)
        parts = list(zip(likes, begins, sizes, strict=True))
        self._views = [flat.as_strided(like.shape, like.stride(), b) for like, b, _ in parts]
        gaps = [flat[b + like.numel() : b + size] for like, b, size in parts if like.numel() < size]
        zero_all_([self._presence, *gaps])  # gaps are sent too, and must not hold NaN
        self._presence[0] = 1.0
        there, sources = [], []
        for i, (index, view) in enumerate(zip(self.indices, self._views, strict=True)):
            main = sums[index]
            if main is None or main.is_sparse:
                self._ordinary = False
                self._presence[0, i] = 0.0  # a number: copying a tensor would wait for the GPU
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
        """Put the sums of all processes into the list: None if no process has a gradient, dense if
        any is. Only a process that lacks a gradient, or has a sparse one, reads the counts."""
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
    """A sum of tensors over a group of processes, on each of which some may be missing."""

    def __init__(self, parameters: Sequence[Tensor], indices: Sequence[int], group: Group) -> None:
        self._group, self._parameters = group, parameters
        self._buckets = plan_buckets(parameters, indices)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        self._sent = 0  # buckets; all processes send them in one order

    def send_complete(
        self, op: str, sums: list[Tensor | None], factor: Scalar, indices: Iterable[int]
    ) -> None:
        """Note that gradients of these parameters are complete, and send buckets that are."""
        for i in indices:
            awaited = self._bucket_of[i].awaited
            if i not in awaited:
                contract = "be complete when autograd has accumulated it"
                got = "one in several parts, as reentrant checkpoints make them"
                advice = "Use reduce_in_backward=False"
                raise RuntimeError(checks.message(op, ".grad", contract, got, advice))
            awaited.remove(i)
        # The last bucket waits for `finish`: until then `abandon` can send NaN in it.
        while self._sent < len(self._buckets) - 1 and not self._buckets[self._sent].awaited:
            self._buckets[self._sent].send(sums, factor, self._group)
            self._sent += 1

    def finish(self, sums: list[Tensor | None], factor: Scalar) -> None:
        """Send the other buckets, and put the sums of all processes into the list."""
        for bucket in self._buckets[self._sent :]:
            bucket.send(sums, factor, self._group)
        for bucket in self._buckets:
            bucket.receive(sums)

    def abandon(self) -> None:
        """Finish the sum, with NaN, so that the other processes do not hang and skip the window."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for i in self._buckets[-1].indices if self._buckets else ():
            parameter = self._parameters[i]
            sums[i] = torch.full_like(_like(parameter), math.nan, device=parameter.device)
        try:
            self.finish(sums, 1.0)
        except torch.OutOfMemoryError:  # other processes still wait: the user must know
            raise
        except RuntimeError:  # other processes are gone, and do not wait
            pass


def plan_buckets(parameters: Sequence[Tensor], indices: Sequence[int]) -> list[Bucket]:
    """Return buckets of one device and dtype each, the last parameters first, as in backward."""
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
    """Return a tensor with the shape and strides of a parameter's dense sum in a bucket, without
    gaps; its dtype and device may differ."""
    like = dense_storage(parameter.detach())
    return like if like.is_contiguous() else torch.empty_like(like, device="meta")
