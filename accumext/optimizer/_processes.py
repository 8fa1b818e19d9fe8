"""Several processes: whose synchronisation to hold back, and a window summed over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accumext import _checks, _scalars, ops
from accumext._scalars import Scalar, as_tensor, sent, to_device, to_host_if_free
from accumext._tensor_kinds import Group, dense_storage, is_dtensor, main_dtype
from accumext._torch_private import assert_on_device, zero_all_
from accumext.optimizer._factors import normaliser
from accumext.optimizer._grads import clear, grads_of
from accumext.optimizer._sums import adding
from accumext.optimizer._window import Box, Window, explain
from accumext.sharding import closing_groups

# What DistributedDataParallel sends at a time: enough for full bandwidth, and little enough
# that it overlaps with filling the next bucket, or with the backward pass.
BUCKET_BYTES = 25 * 2**20

ALIGNMENT = 16  # elements; where gradients begin, for aligned vector loads

_SAME_COUNT = (
    "Give every process the same number, where a micro-batch with weight=0 counts for nothing, and "
    "call step and flush on all of them"
)


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
        self._begins = [0]
        for parameter in self.parameters:
            size = -(-_like(parameter).numel() // ALIGNMENT) * ALIGNMENT
            self._begins.append(self._begins[-1] + size)
        self._flat = torch.empty(0)
        self._views: list[Tensor] = []  # the part of each parameter in it
        self._ordinary = True  # this process has a dense gradient for each parameter
        self._work: dist.Work | None = None

    def send(self, sums: list[Tensor | None], factor: Scalar, group: Group) -> None:
        """Begin to sum `sums * factor` over the group; the list does not keep what is sent."""
        mine = [sums[i] for i in self.indices]
        first = _like(self.parameters[0])
        size = self._begins[-1] + 3 * len(mine)
        self._flat = torch.empty(size, dtype=main_dtype(first), device=first.device)
        self._ordinary = not any(main is None or main.is_sparse for main in mine)
        presence = self._presence().zero_()
        presence[0] = 1.0
        for i, main in enumerate(mine):  # number by number: no copy from the host waits for a GPU
            if main is None or main.is_sparse:
                presence[0, i] = 0.0
            if main is not None and main.is_sparse:
                presence[1, i], presence[2, i] = 1.0, float(main.sparse_dim())
        ends = [begin + _like(p).numel() for begin, p in zip(self._begins, self.parameters)]
        gaps = [self._flat[e:b] for e, b in zip(ends, self._begins[1:], strict=True) if e < b]
        zero_all_(gaps)  # they travel too, and nobody may find NaN in them
        self._views = self._parts()
        there, sources = [], []
        for view, main in zip(self._views, mine, strict=True):
            if main is None:
                view.zero_()
            else:
                there.append(view)
                dense = dense_storage(main.to_dense() if main.is_sparse else main)
                sources.append(sent(dense, view.device))
        ops.accumulate_(there, sources, inv_scale=to_device(first.device, factor), overwrite=True)
        for i in self.indices:
            sums[i] = None
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def receive(self, sums: list[Tensor | None]) -> None:
        """Put the sums of all processes there; none for a parameter that nobody has a gradient for.

        Only a process that lacks a gradient, or has a sparse one, reads what the others have. Where
        any has a dense one, the sum is dense.
        """
        assert self._work is not None
        self._work.wait()
        rows = [(1.0, 0.0, 0.0)] * len(self._views)
        if not self._ordinary:
            rows = self._presence().T.tolist()
        parts = zip(self.indices, self.parameters, self._views, rows, strict=True)
        for i, parameter, view, (dense, sparse, sparse_dims) in parts:
            if dense or sparse:
                main = _as_main(parameter, view)
                sums[i] = main if dense else main.to_sparse(round(sparse_dims / sparse))

    def _presence(self) -> Tensor:
        """The end of the tensor: [3, parameters]."""
        return self._flat[self._begins[-1] :].view(3, -1)

    def _parts(self) -> list[Tensor]:
        """The part of each parameter, with its strides, or what they are without gaps."""
        parts = []
        for begin, parameter in zip(self._begins, self.parameters, strict=False):
            like = _like(parameter)
            if not like.is_contiguous():
                like = torch.empty_like(like, device="meta")
            parts.append(self._flat.as_strided(like.shape, like.stride(), begin))
        return parts


class Agreement(NamedTuple):
    """The numbers of a window, of all processes."""

    weight: Scalar  # of shards the mean
    kept: Scalar  # micro-batches
    found_inf: Scalar
    any_held: bool  # whether any process has something in the window

    @property
    def mean_weight(self) -> Scalar:
        """Of a micro-batch of one process."""
        return self.weight / self.kept

    @classmethod
    def of(
        cls,
        op: str,
        box: Box,
        window: Window,
        weight: Scalar,  # of the window on this process
        count: int,  # of its micro-batches
        group: Group | None,  # beside the mesh of the shards
        flushing: bool,
    ) -> Agreement:
        """Sum the numbers of the window, and raise where processes do not close the same one.

        If only a device knows the sums, a flush alone looks at them.

        Raises:
            RuntimeError: windows are not all full, of one size, or not all flushed with equally
                many micro-batches; or not of the same parameters; or a process did not come.
        """
        parameters = box.target.parameters()
        groups, shards = closing_groups(parameters, group)
        world = math.prod(g.size() for g in groups)
        # That which the groups serve; others may be on the host.
        device = next(filter(is_dtensor, parameters), parameters[0]).device
        rank = 0
        for each in groups:
            rank = rank * each.size() + each.rank()
        closing = torch.zeros(2, world, dtype=torch.float64, device=device)
        closing[0, rank] = count if flushing else -box.settings.window  # of a full one its size
        closing[1, rank] = sum(parameters[i].numel() for i in trained(parameters, window))
        kept = count if window.finite is None else window.finite
        found = window.found_inf
        mine = [as_tensor(n, torch.float64, device) for n in (weight, kept, found)]
        numbers = torch.cat([torch.stack(mine), closing.flatten()])
        try:
            for each in groups:
                dist.all_reduce(numbers, group=each)
        except RuntimeError as error:
            got = f"no answer from some ({str(error).splitlines()[0]})"
            text = _checks.message(op, "the window", "be closed by every process", got, _SAME_COUNT)
            raise RuntimeError(text) from error
        means = numbers[:2] / shards
        found_inf = to_host_if_free((numbers[2] != 0).double())
        total, finite = to_host_if_free(means[0]), to_host_if_free(means[1])
        if not flushing and not _scalars.on_host(numbers):
            alike = (numbers[3 : 3 + world] == numbers[3]).all()
            assert_on_device(alike, f"{op}: the window must be of one size on every process")
            return cls(total, finite, found_inf, True)
        counts, elements = numbers[3:].view(2, world).tolist()
        if len(set(counts)) > 1:
            got = ", ".join(_counted(n) for n in counts) + " by rank"
            contract = "hold the same number of micro-batches on every process"
            raise RuntimeError(_checks.message(op, "the window", contract, got, _SAME_COUNT))
        if len(set(elements)) > 1:
            got = ", ".join(f"{n:.0f}" for n in elements) + " elements by rank"
            contract = "be of the same trainable parameters on every process"
            raise RuntimeError(_checks.message(op, "the window", contract, got))
        return cls(total, finite, found_inf, any(counts))


def _counted(number: float) -> str:
    """Micro-batches of a process; those of a full window come negative."""
    return f"{number:.0f}" if number >= 0 else f"full with {-number:.0f}"


class WindowAllReduce:
    """The sum of one window over a group of processes: of all that is trained or has a gradient."""

    def __init__(self, box: Box, window: Window, group: Group) -> None:
        self._box = box
        self._group = group
        self._parameters = box.target.parameters()
        self._buckets = _plan(self._parameters, trained(self._parameters, window))
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        self._sent = 0  # buckets; all processes send them in one order

    @property
    def mean_weight(self) -> Scalar:
        """Of a micro-batch of one process, once they have agreed."""
        return self._agreed.mean_weight

    def agree(self, op: str, window: Window, weight: Scalar, count: int, flushing: bool) -> bool:
        """Agree with the other processes, `Agreement.of`; whether any has something in the window.

        Nothing has changed if that raises.
        """
        group = self._group
        self._agreed = Agreement.of(op, self._box, window, weight, count, group, flushing)
        return self._agreed.any_held

    def send_complete(
        self, op: str, sums: list[Tensor | None], factor: Scalar, indices: Iterable[int]
    ) -> None:
        """Send what can be sent now that these parameters have their last gradient.

        Raises:
            RuntimeError: one of them had its last already.
        """
        for i in indices:
            awaited = self._bucket_of[i].awaited
            if i not in awaited:
                contract = "be complete when autograd has accumulated it"
                got = "one in several parts, as reentrant checkpoints make them"
                advice = "Use reduce_in_backward=False"
                raise RuntimeError(_checks.message(op, ".grad", contract, got, advice))
            awaited.remove(i)
        # The last one stays: while it does, `abandon` can still tell the others.
        while self._sent < len(self._buckets) - 1 and not self._buckets[self._sent].awaited:
            self._send_next(sums, factor)

    def finish(self, sums: list[Tensor | None], window: Window) -> Window:
        """Send the rest, wait, and make the sum of all processes the window."""
        factor = normaliser(window, "sum").value()
        while self._sent < len(self._buckets):
            self._send_next(sums, factor)
        for bucket in self._buckets:
            bucket.receive(sums)
        weight, kept, found_inf, _ = self._agreed
        finite = None if window.finite is None else kept
        return window._replace(
            parameters=self._parameters, sums=sums, norm=None, weight=weight,
            world=kept, finite=finite, unit=1.0, scale=1.0, found_inf=found_inf,
        )  # fmt: skip

    def abandon(self, window: Window) -> None:
        """Let the sum arrive on the other processes, not finite, so that they skip the window."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for i in self._buckets[-1].indices if self._buckets else ():
            sums[i] = torch.full_like(_like(self._parameters[i]), math.nan)
        with suppress(RuntimeError):  # others that are gone need nothing
            self.finish(sums, window)

    def _send_next(self, sums: list[Tensor | None], factor: Scalar) -> None:
        self._buckets[self._sent].send(sums, factor, self._group)
        self._sent += 1


def sum_over_processes(box: Box, op: str, flushing: bool) -> bool:
    """Make the open window that of all processes; False if there is nothing in it."""
    window, group, sharded = box.state.window, box.group, box.sharded
    if group is None and sharded is not None:
        return _close_shards(box, op, flushing)
    if group is None:
        if window.held_back:
            contract = "be known for gradients that micro_batch(model) has held back"
            advice = "Run a micro_batch(model) first, or pass process_group to the constructor"
            got = "a window that was loaded"
            raise RuntimeError(_checks.message(op, "the group", contract, got, advice))
        return window.micro_batches > 0
    if window.world is not None:  # an earlier step ended in an error after that
        return True
    all_reduce = box.state.all_reduce
    if all_reduce is None:
        window = window.out_of_grad(box.target.parameters())
        if box.settings.on_nonfinite == "skip_micro_batch" and window.finite is None:
            window = window._replace(finite=float(window.micro_batches))
        all_reduce = WindowAllReduce(box, window, group)
        if not all_reduce.agree(op, window, window.weight, window.micro_batches, flushing):
            return False
        if sharded is not None:
            sharded.note_weight(all_reduce.mean_weight)
            collect_held(box, op)
            window = box.state.window
    sums = list(window.of(box.target.parameters()).sums)
    window = window._replace(parameters=(), sums=())  # a bucket frees what it has copied
    if box.state.window.in_grad:
        clear(box.target.parameters())
    box.state = box.state._replace(window=Window(), all_reduce=None)
    try:
        window = all_reduce.finish(sums, window)
        sums = box.target.send(list(window.sums))()
        box.state = box.state._replace(window=window._replace(sums=sums))
    except BaseException as error:
        if not isinstance(error, RuntimeError):
            raise
        contract = "be summed over all processes"
        got = f"an error ({str(error).splitlines()[0]}), and it was dropped"
        raise RuntimeError(_checks.message(op, "the window", contract, got)) from error
    return True


def _close_shards(box: Box, op: str, flushing: bool) -> bool:
    """Make the weight that of all shards, and take in what FSDP holds; False if nothing is there.

    Gradients were averaged over the shards by FSDP.
    """
    window, sharded = box.state.window, box.sharded
    assert sharded is not None
    if window.agreed:
        return True
    count = window.micro_batches
    if count == 0 and (sharded.idle or not flushing):
        return False
    agreed = Agreement.of(op, box, window, window.weight, count, None, flushing)
    if not agreed.any_held:
        sharded.idle = True
        return False
    collect_held(box, op)
    window = box.state.window._replace(
        weight=agreed.weight, agreed=True, found_inf=agreed.found_inf
    )
    box.state = box.state._replace(window=window)
    sharded.note_weight(agreed.mean_weight)
    return True


def collect_held(box: Box, op: str) -> None:
    """Add the gradients that FSDP holds of the open window to it, reduced.

    An exception while they are reduced drops the window, and says so.
    """
    sharded = box.sharded
    if sharded is None:
        return
    sharded.refuse_to_collect(op)
    if not sharded.holds:
        sharded.collect()
        return
    parameters = box.target.parameters()
    before = grads_of(parameters)
    try:
        sharded.collect()
        window = box.state.window.of(parameters)
        with torch.no_grad():
            window = adding(window, grads_of(parameters), 1.0).run([])._replace(norm=None)
        clear(parameters)
        box.state = box.state._replace(window=window)
    except BaseException as error:
        box.drop()
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        explain(error, f"{op}: the open window was dropped: it was being reduced")
        raise


def trained(parameters: Sequence[Tensor], window: Window) -> list[int]:
    """Which are trained or have a gradient."""
    sums = window.of(parameters).sums or [None] * len(parameters)
    rows = enumerate(zip(parameters, sums, strict=True))
    return [i for i, (p, m) in rows if p.requires_grad or m is not None or p.grad is not None]


def _plan(parameters: Sequence[Tensor], indices: Sequence[int]) -> list[Bucket]:
    """Buckets of one device and dtype each, the last parameters first: so backward makes them."""
    planned: list[Bucket] = []
    open_: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for i in reversed(indices):
        like = _like(parameters[i])
        dtype = main_dtype(like)
        members, size = open_.pop((like.device, dtype), ([], 0))
        members.append(i)
        size += like.numel() * dtype.itemsize
        if size >= BUCKET_BYTES:
            planned.append(Bucket(members, parameters))
        else:
            open_[like.device, dtype] = (members, size)
    return planned + [Bucket(members, parameters) for members, _ in open_.values()]


def _like(parameter: Tensor) -> Tensor:
    """What a parameter's dense sum looks like here, but for its dtype."""
    return dense_storage(parameter.detach())


def _as_main(parameter: Tensor, view: Tensor) -> Tensor:
    """A part of a bucket as the sum of a real, complex or sharded parameter."""
    if is_dtensor(parameter):
        main = torch.zeros_like(parameter, dtype=main_dtype(parameter)).detach()
        dense_storage(main).copy_(view)
        return main
    return torch.view_as_complex(view) if parameter.is_complex() else view
