"""Several processes: whose synchronisation to hold back, and a window summed over all of them."""

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
from accumext.distributed import ShardedWindow
from accumext.optimizer._agreement import agree, trained
from accumext.optimizer._factors import normaliser
from accumext.optimizer._grads import clear, grads_of, put
from accumext.optimizer._sums import adding
from accumext.optimizer._window import Box, Window, explain
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


def hold_back(
    op: str, model: object, group: Group | None
) -> tuple[AbstractContextManager[None], Group | None]:
    """A context in which the model does not synchronise, and the group its gradients then need.

    Nothing of FSDP (fully_shard): with synchronize="window" it is ShardedWindow that does so.
    """
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
    return _no_sync(replicas), group or (groups[0] if groups else None)


@contextmanager
def _no_sync(replicas: Sequence[DistributedDataParallel]) -> Iterator[None]:
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


class WindowAllReduce:
    """The sum of one window over a group of processes: of all that is trained or has a gradient."""

    def __init__(self, box: Box, window: Window, group: Group) -> None:
        self._box, self._group = box, group
        self._parameters = box.target.parameters()
        self._buckets = _plan(self._parameters, trained(self._parameters, window))
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        self._sent = 0  # buckets; all processes send them in one order

    def agree(self, op: str, window: Window, weight: Scalar, count: int, flushing: bool) -> bool:
        """Tell whether any process has something in the window, once all agree on its close."""
        window = window._replace(weight=weight, micro_batches=count)
        self.agreed = agree(op, self._box, window, self._group, flushing)
        return self.agreed.any_held

    def send_complete(
        self, op: str, sums: list[Tensor | None], factor: Scalar, indices: Iterable[int]
    ) -> None:
        """Send what can be sent now that these parameters have their last gradient."""
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

    def finish(self, sums: list[Tensor | None], window: Window) -> Window:
        """Send the rest, wait, and make the sum of all processes the window."""
        factor = normaliser(window, "sum").value()
        for bucket in self._buckets[self._sent :]:
            bucket.send(sums, factor, self._group)
        for bucket in self._buckets:
            bucket.receive(sums)
        weight, kept, found_inf, _ = self.agreed
        return window._replace(
            parameters=self._parameters, sums=sums, norm=None, weight=weight,
            world=kept, finite=None if window.finite is None else kept, unit=1.0, scale=1.0,
            found_inf=found_inf,
        )  # fmt: skip

    def abandon(self, window: Window) -> None:
        """Let the sum arrive on the other processes, not finite, so that they skip the window."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for i in self._buckets[-1].indices if self._buckets else ():
            parameter = self._parameters[i]
            sums[i] = torch.full_like(_like(parameter), math.nan, device=parameter.device)
        try:
            self.finish(sums, window)
        except torch.OutOfMemoryError:  # the others wait
            raise
        except RuntimeError:  # those that are gone need nothing
            pass


def sum_over_processes(box: Box, op: str, flushing: bool) -> bool:
    """Make the open window that of all processes; False if there is nothing in it."""
    window, group, sharded = box.state.window, box.group, box.sharded
    if group is None and sharded is not None:
        return _close_shards(box, sharded, op, flushing)
    if group is None:
        if window.held_back:
            contract = "be known for gradients that micro_batch(model) has held back"
            advice = "Run a micro_batch(model) first, or pass process_group to the constructor"
            got = "a window that was loaded"
            raise RuntimeError(checks.message(op, "the group", contract, got, advice))
        return window.micro_batches > 0
    if window.world is not None:  # an earlier step ended in an error after that
        return True
    all_reduce, parameters = box.state.all_reduce, box.target.parameters()
    if all_reduce is None:
        window = window.out_of_grad(parameters)
        if box.settings.on_nonfinite == "skip_micro_batch" and window.finite is None:
            window = window._replace(finite=float(window.micro_batches))
        all_reduce = WindowAllReduce(box, window, group)
        if not all_reduce.agree(op, window, window.weight, window.micro_batches, flushing):
            return False
        if sharded is not None:
            sharded.note_weight(all_reduce.agreed.weight / all_reduce.agreed.kept)
            collect_held(box, op)
            window = box.state.window
    sums = list(window.of(parameters).sums)
    window = window._replace(parameters=(), sums=())  # a bucket frees what it has copied
    if box.state.window.in_grad:
        clear(parameters)
    box.state = box.state._replace(window=Window(), all_reduce=None)
    try:
        window = all_reduce.finish(sums, window)
        sums = box.target.send(list(window.sums))()
        box.state = box.state._replace(window=window._replace(sums=sums))
    except BaseException as error:
        explain(error, f"{op}: the open window was dropped: it was being summed over all processes")
        raise
    return True


def _close_shards(box: Box, sharded: ShardedWindow, op: str, flushing: bool) -> bool:
    """Make the weight that of all shards, over which FSDP has averaged the gradients, and take in
    what FSDP holds; False if nothing is there."""
    window = box.state.window
    if window.agreed:
        return True
    if window.micro_batches == 0 and (sharded.idle or not flushing):
        return False
    agreed = agree(op, box, window, None, flushing)
    if not agreed.any_held:
        sharded.idle = True
        return False
    collect_held(box, op)
    weight, _, found_inf, _ = agreed
    window = box.state.window._replace(weight=weight, found_inf=found_inf, agreed=True)
    box.state = box.state._replace(window=window)
    sharded.note_weight(agreed.weight / agreed.kept)
    return True


def collect_held(box: Box, op: str) -> None:
    """Add the gradients that FSDP holds of the open window to it, reduced.

    An exception while they are reduced drops the window, and says so.
    """
    sharded, parameters = box.sharded, box.target.parameters()
    if sharded is None:
        return
    sharded.refuse_to_collect(op)
    if not sharded.holds:
        sharded.collect()
        return
    before = grads_of(parameters)
    try:
        sharded.collect()
        with torch.no_grad():
            window = adding(box.state.window.of(parameters), grads_of(parameters), 1.0).run([])
        clear(parameters)
        box.state = box.state._replace(window=window._replace(norm=None))
    except BaseException as error:
        box.drop()
        put(parameters, before)
        explain(error, f"{op}: the open window was dropped: it was being reduced")
        raise


def _plan(parameters: Sequence[Tensor], indices: Sequence[int]) -> list[Bucket]:
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
