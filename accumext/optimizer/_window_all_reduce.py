"""A window summed over processes: its numbers first, then its main gradients in buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accumext import _checks, _scalars, ops
from accumext._scalars import Scalar, any_set, as_tensor, sent, to_device, to_host_if_free
from accumext._tensor_kinds import Group, dense_storage, is_dtensor, main_dtype
from accumext._torch_private import zero_all_
from accumext.optimizer._accumulator import Accumulator
from accumext.optimizer._loss_scaling import UNSCALED
from accumext.optimizer._sharded_window import closing_groups
from accumext.optimizer._window import Window

# What DistributedDataParallel sends at a time: enough for full bandwidth, and little enough
# that it overlaps with filling the next bucket, or with the backward pass.
BUCKET_BYTES = 25 * 2**20

ALIGNMENT = 16  # elements; where gradients begin, for aligned vector loads

_FULL = -1.0  # in place of a number of micro-batches: of a window that is full
_SAME_COUNT = (
    "Give every process the same number, where a micro-batch with weight=0 counts for nothing, and "
    "call step and flush on all of them"
)


class Bucket:
    """Main gradients of some parameters in one flat tensor, and word of who has which.

    Every process sends every parameter, so that the calls match: zeros for a missing gradient, a
    sparse one dense. At the end of the tensor stand, for each parameter, how many processes have a
    dense gradient, how many a sparse one, and the sum of sparse dimensions over the latter.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        # Whose gradients may still change: hooks tell when they are complete.
        self.awaited = {p for p in parameters if p.requires_grad or p.grad is not None}
        self._begins = [0]
        for parameter in parameters:
            size = -(-_like(parameter).numel() // ALIGNMENT) * ALIGNMENT
            self._begins.append(self._begins[-1] + size)
        self._flat = torch.empty(0)
        self._views: list[Tensor] = []  # the part of each parameter in it
        self._ordinary = True  # this process has a dense gradient for each parameter
        self._work: dist.Work | None = None

    def send(self, main_grads: dict[Tensor, Tensor], factor: Scalar, group: Group) -> None:
        """Begin to sum `main_grads * factor` over the group; these main_grads leave the dict."""
        mine = [main_grads.pop(parameter, None) for parameter in self.parameters]
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
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def receive(self) -> dict[Tensor, Tensor]:
        """The sums, as main gradients; none for a parameter that no process has a gradient for.

        Only a process that lacks a gradient, or has a sparse one, reads what the others have. Where
        any has a dense one, the sum is dense.
        """
        assert self._work is not None
        self._work.wait()
        sums = dict(zip(self.parameters, self._views, strict=True))
        if self._ordinary:
            return {p: _as_main(p, view) for p, view in sums.items()}
        main_grads = {}
        for p, (dense, sparse, sparse_dims) in zip(sums, self._presence().T.tolist(), strict=True):
            if dense or sparse:
                main = _as_main(p, sums[p])
                main_grads[p] = main if dense else main.to_sparse(round(sparse_dims / sparse))
        return main_grads

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
    found_inf: Tensor  # []
    any_held: bool  # whether any process has something in the window

    @property
    def mean_weight(self) -> Scalar:
        """Of a micro-batch of one process."""
        return self.weight / self.kept

    @classmethod
    def of(
        cls,
        op: str,
        window: Window,
        weight: Scalar,  # of the window on this process
        count: int,  # of its micro-batches
        parameters: Sequence[Tensor],
        group: Group | None,  # beside the mesh of the shards
        flushing: bool,
    ) -> Agreement:
        """Sum the numbers of the window, and raise where processes do not close the same one.

        If only a device knows the sums, a flush alone looks at them.

        Raises:
            RuntimeError: windows are not all full, or not all flushed with equally many
                micro-batches; or not of the same parameters; or a process did not come.
        """
        groups, shards = closing_groups(parameters, group)
        world = math.prod(g.size() for g in groups)
        # That which the groups serve; others may be on the host.
        device = next(filter(is_dtensor, parameters), parameters[0]).device
        rank = 0
        for each in groups:
            rank = rank * each.size() + each.rank()
        closing = torch.zeros(2, world, dtype=torch.float64, device=device)
        closing[0, rank] = count if flushing else _FULL
        closing[1, rank] = sum(p.numel() for p in trained(parameters, window))
        kept = count if window.finite_micro_batches is None else window.finite_micro_batches
        found_inf = any_set(window.found_infs.values())
        mine = [as_tensor(n, torch.float64, device) for n in (weight, kept, found_inf)]
        numbers = torch.cat([torch.stack(mine), closing.flatten()])
        try:
            for each in groups:
                dist.all_reduce(numbers, group=each)
        except RuntimeError as error:
            got = f"no answer from some ({str(error).splitlines()[0]})"
            text = _checks.message(op, "the window", "be closed by every process", got, _SAME_COUNT)
            raise RuntimeError(text) from error
        means = numbers[:2] / shards
        total, finite = to_host_if_free(means[0]), to_host_if_free(means[1])
        if not flushing and not _scalars.on_host(numbers):
            return cls(total, finite, numbers[2], True)
        counts, elements = numbers[3:].view(2, world).tolist()
        if len(set(counts)) > 1:
            got = ", ".join("full" if n == _FULL else f"{n:.0f}" for n in counts) + " by rank"
            contract = "hold the same number of micro-batches on every process"
            raise RuntimeError(_checks.message(op, "the window", contract, got, _SAME_COUNT))
        if len(set(elements)) > 1:
            got = ", ".join(f"{n:.0f}" for n in elements) + " elements by rank"
            contract = "be of the same trainable parameters on every process"
            raise RuntimeError(_checks.message(op, "the window", contract, got))
        return cls(total, finite, numbers[2], any(counts))


class WindowAllReduce:
    """The sum of one window over a group of processes: of all that is trained or has a gradient."""

    def __init__(self, parameters: Sequence[Tensor], window: Window, group: Group) -> None:
        self._group = group
        self._all_parameters = parameters
        self._parameters = trained(parameters, window)
        self._buckets = _plan(self._parameters)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._sent = 0  # buckets; all processes send them in one order

    @property
    def mean_weight(self) -> Scalar:
        """Of a micro-batch of one process, once they have agreed."""
        return self._agreed.mean_weight

    def agree(self, op: str, window: Window, weight: Scalar, count: int, flushing: bool) -> bool:
        """Agree with the other processes, `Agreement.of`; whether any has something in the window.

        Nothing has changed if that raises.
        """
        parameters, group = self._all_parameters, self._group
        self._agreed = Agreement.of(op, window, weight, count, parameters, group, flushing)
        return self._agreed.any_held

    def send_complete(self, op: str, window: Window, parameters: Iterable[Tensor]) -> None:
        """Send what can be sent now that these parameters have their last gradient.

        Raises:
            RuntimeError: one of them had its last already.
        """
        for parameter in parameters:
            awaited = self._bucket_of[parameter].awaited
            if parameter not in awaited:
                contract = "be complete when autograd has accumulated it"
                got = "one in several parts, as reentrant checkpoints make them"
                advice = "Use reduce_in_backward=False"
                raise RuntimeError(_checks.message(op, ".grad", contract, got, advice))
            awaited.remove(parameter)
        # The last one stays: while it does, `abandon` can still tell the others.
        while self._sent < len(self._buckets) - 1 and not self._buckets[self._sent].awaited:
            self._send_next(dict(window.by_parameter), window.normaliser("sum").value())

    def finish(self, window: Window) -> None:
        """Send the rest, wait, and make the sum of all processes the window."""
        main_grads, factor = dict(window.by_parameter), window.normaliser("sum").value()
        window.replace({})  # a bucket frees what it has copied
        while self._sent < len(self._buckets):
            self._send_next(main_grads, factor)
        sums: dict[Tensor, Tensor] = {}
        for bucket in self._buckets:
            sums |= bucket.receive()
        window.replace({p: sums[p] for p in self._parameters if p in sums})
        weight, kept, found_inf, _ = self._agreed
        window.note_found_inf(found_inf)
        window.weight, window.world_micro_batches = weight, kept
        window.unit_weight, window.unit_scale = 1.0, UNSCALED
        window.writes += 1
        if window.finite_micro_batches is not None:
            window.finite_micro_batches = kept

    def abandon(self, window: Window) -> None:
        """Let the sum arrive on the other processes, not finite, so that they skip the window."""
        last = self._buckets[-1].parameters if self._buckets else []
        poison = {p: torch.full_like(_like(p), math.nan) for p in last}
        window.replace(window.by_parameter | poison)
        with suppress(RuntimeError):  # others that are gone need nothing
            self.finish(window)

    def _send_next(self, main_grads: dict[Tensor, Tensor], factor: Scalar) -> None:
        self._buckets[self._sent].send(main_grads, factor, self._group)
        self._sent += 1


def sum_over_processes(
    accumulator: Accumulator, op: str, parameters: list[Tensor], flushing: bool
) -> bool:
    """Make the open window that of all processes; False if there is nothing in it."""
    window, group, sharded = accumulator.window, accumulator.group, accumulator.sharded
    if group is None and sharded is not None:
        return _close_shards(accumulator, op, parameters, flushing)
    if group is None:
        if window.held_back:
            contract = "be known for gradients that micro_batch(model) has held back"
            advice = "Run a micro_batch(model) first, or pass process_group to the constructor"
            got = "a window that was loaded"
            raise RuntimeError(_checks.message(op, "the group", contract, got, advice))
        return window.micro_batches > 0
    if window.world_micro_batches is not None:  # an earlier step ended in an error after that
        return True
    all_reduce = accumulator.all_reduce
    if all_reduce is None:
        window.detach()
        skips = accumulator.settings.on_nonfinite == "skip_micro_batch"
        if skips and window.finite_micro_batches is None:
            window.finite_micro_batches = float(window.micro_batches)
        all_reduce = WindowAllReduce(parameters, window, group)
        if not all_reduce.agree(op, window, window.weight, window.micro_batches, flushing):
            return False
        if sharded is not None:
            sharded.note_weight(all_reduce.mean_weight)
            accumulator.collect_held(op)
    accumulator.all_reduce = None
    try:
        all_reduce.finish(window)
        if accumulator.masters is not None and accumulator.sends_to_host:
            window.replace(accumulator.masters.bring(window.by_parameter))
    except BaseException as error:
        accumulator.window = Window()
        if not isinstance(error, RuntimeError):
            raise
        contract = "be summed over all processes"
        got = f"an error ({str(error).splitlines()[0]}), and it was dropped"
        raise RuntimeError(_checks.message(op, "the window", contract, got)) from error
    return True


def _close_shards(
    accumulator: Accumulator, op: str, parameters: list[Tensor], flushing: bool
) -> bool:
    """Make the weight that of all shards, and take in what FSDP holds; False if nothing is there.

    Gradients were averaged over the shards by FSDP.
    """
    window, sharded = accumulator.window, accumulator.sharded
    assert sharded is not None
    if window.agreed:
        return True
    count = window.micro_batches
    if count == 0 and (sharded.idle or not flushing):
        return False
    agreed = Agreement.of(op, window, window.weight, count, parameters, None, flushing)
    if not agreed.any_held:
        sharded.idle = True
        return False
    accumulator.collect_held(op)
    window.note_found_inf(agreed.found_inf)
    window.weight, window.agreed = agreed.weight, True
    sharded.note_weight(agreed.mean_weight)
    return True


def trained(parameters: Sequence[Tensor], window: Window) -> list[Tensor]:
    """Those that are trained or have a gradient."""
    main_grads = window.by_parameter
    return [p for p in parameters if p.requires_grad or p in main_grads or p.grad is not None]


def _plan(parameters: Sequence[Tensor]) -> list[Bucket]:
    """Buckets of one device and dtype each, the last parameters first: so backward makes them."""
    planned: list[Bucket] = []
    open_: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for parameter in reversed(parameters):
        like = _like(parameter)
        dtype = main_dtype(like)
        members, size = open_.pop((like.device, dtype), ([], 0))
        members.append(parameter)
        size += like.numel() * dtype.itemsize
        if size >= BUCKET_BYTES:
            planned.append(Bucket(members))
        else:
            open_[like.device, dtype] = (members, size)
    return planned + [Bucket(members) for members, _ in open_.values()]


def _like(parameter: Tensor) -> Tensor:
    """What a parameter's dense main gradient looks like here, but for its dtype."""
    return dense_storage(parameter.detach())


def _as_main(parameter: Tensor, view: Tensor) -> Tensor:
    """A part of a bucket as the main gradient of a real, complex or sharded parameter."""
    if is_dtensor(parameter):
        main = torch.zeros_like(parameter, dtype=main_dtype(parameter)).detach()
        dense_storage(main).copy_(view)
        return main
    return torch.view_as_complex(view) if parameter.is_complex() else view
