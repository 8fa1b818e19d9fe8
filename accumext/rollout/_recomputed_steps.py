"""Steps of a recurrence under autograd whose graph keeps no tensors: the backward pass runs the
steps again, a segment at a time, from states that were kept between segments.

The graph is the one that the steps build. So gradients reach whatever they use, hooks run once, and
DistributedDataParallel sends what one backward pass makes. Only the tensors that it would save are
left out: each is a number, by which the tensor is found when the segment has been run again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from accumext._checks import message
from accumext._torch_private import leaves_since, next_node_number, write_count
from accumext.recurrence import (
    State,
    copy_nesting,
    detach,
    map_tensors,
    replay_rng,
    rng_state,
    set_rng_state,
    tensors,
    write_counts,
)
from accumext.rollout._checkpoint_plan import SMALLEST, Plan, Sizes, kept_at_first, split

# (step, what it starts from, whether its loss counts) -> (what the next one starts from, loss)
Step = Callable[[int, State, bool], tuple[State, Tensor]]
Choose = Callable[[Sizes], Plan]


class RecomputedSteps:
    """The steps of one call."""

    def __init__(
        self,
        op: str,
        step: Step,
        steps: int,
        device: torch.device,  # whose generator dropout draws from, beside the CPU's
        plan: Plan | None,  # None: `choose` finds it from the sizes of the first steps
        choose: Choose,
        starts: Collection[int] = (),  # steps to which `rewind` will go back
    ) -> None:
        self.op, self.steps = op, steps
        self._step, self._choose = step, choose
        self._autocast = _autocast_now(device)
        self._checkpoints = _Checkpoints(op, device, starts)
        self._grid: list[int] | None = None  # steps at which segments begin; None: not chosen yet
        # The tensors of the segment that was run again last. It is known by its name, for a segment
        # holds this object: without circles, all is freed with the graph.
        self._found: dict[int, Tensor] = {}
        self._found_of: object = None
        self._lock = threading.RLock()  # each device has a thread of its own in a backward pass
        # The leaves of the graph of the first step, and their numbers of writes when steps ran
        # last: autograd saves no part of a sum, but the steps that run again read it.
        self._leaves: list[Tensor] | None = None
        self._writes: list[int] = []
        self._first_node = next_node_number()
        if plan is not None:
            self._follow(plan, 0)

    def run(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None
    ) -> tuple[State, Tensor | None]:
        """Run steps [begin, end). Return the carry after them, and `total` with the losses of steps
        [counting, end) added."""
        while begin < end:
            measured = self._grid is None and end - begin > SMALLEST
            stop = begin + SMALLEST if measured else min(self._next_checkpoint(begin), end)
            if stop == self.steps:  # the backward pass begins with these: their graph is kept
                carry, total = self._run_segment(begin, counting, stop, carry, total)
            else:
                carry, total = self._run_recorded(begin, counting, stop, carry, total, measured)
            begin = stop
        self._writes = write_counts(self._leaves or [])
        return carry, total

    def rewind(self, step: int) -> State:
        """Go back before a step of `starts`, generators too. Return its carry, without a graph."""
        checkpoint = self._checkpoints.at(step, self._pass_over)
        set_rng_state(checkpoint.rng, self._checkpoints.device)
        return copy_nesting(checkpoint.carry)

    def _next_checkpoint(self, step: int) -> int:
        if self._grid is None:
            return self.steps
        following = bisect_right(self._grid, step)
        return self._grid[following] if following < len(self._grid) else self.steps

    def _run_segment(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None = None
    ) -> tuple[State, Tensor | None]:
        """As `run`, with nothing recorded. Losses are added one by one: some of torch's lie in the
        memory of what they are a mean of."""
        for t in range(begin, end):
            self._checkpoints.save_start(t, carry)
            carry, loss = self._step(t, carry, t >= counting)
            if self._leaves is None and torch.is_grad_enabled():
                self._leaves = leaves_since(self._first_node, [loss, *tensors(carry)])
            if t >= counting:
                total = loss if total is None else total + loss
        return carry, total

    def _run_recorded(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None,
        measured: bool,
    ) -> tuple[State, Tensor | None]:  # fmt: skip
        self._checkpoints.save(begin, carry)
        sizes = _Measure() if measured else None
        segment = _Segment(self, begin, counting, end, carry, sizes)
        with saved_tensors_hooks(segment.pack, segment.unpack):
            if sizes is not None:
                carry, total = self._run_segment(begin, counting, end - 1, carry, total)
                sizes.before_last = sizes.total()
                begin = end - 1
            carry, total = self._run_segment(begin, counting, end, carry, total)
        if sizes is not None:
            segment.measure = None
            checkpoint = [*tensors(carry), *rng_state(self._checkpoints.device)]
            state = tensors(carry[1])
            graph = sizes.total() - sizes.before_last
            self._follow(self._choose(Sizes(memory(checkpoint), memory(state), graph)), end)
        return carry, total

    def _follow(self, plan: Plan, begin: int) -> None:
        """Segments from `begin` on, of equal length but for the first of them: the last one, which
        does not run again, has that length, too."""
        self._grid = sorted({0, begin, *range(self.steps - plan.length, begin, -plan.length)})
        self._checkpoints.follow(self._grid[:-1], plan.kept)  # the last segment does not run again

    def _pass_over(self, begin: int, end: int, carry: State) -> State:
        """The carry before step `end`, without a graph."""
        with torch.no_grad(), self._autocast():
            return self._run_segment(begin, end, end, copy_nesting(carry))[0]

    def unpack(self, segment: _Segment, index: int) -> Tensor:
        """A tensor that the graph of a segment would have saved. It is given away."""
        with self._lock:
            if self._found_of is not segment.name or index not in self._found:
                self._found_of, self._found = None, {}  # one segment's at a time
                self._found = self._replay(segment)
                self._found_of = segment.name
            return self._found.pop(index)

    def _replay(self, segment: _Segment) -> dict[int, Tensor]:
        """Run a segment again for the tensors that its graph would have saved."""
        if write_counts(self._leaves or []) != self._writes:
            raise RuntimeError(_changed(self.op))
        checkpoint = self._checkpoints.at(segment.begin, self._pass_over)
        requires = iter(segment.requires_grad)
        carry = map_tensors(lambda t: t.detach().requires_grad_(next(requires)), checkpoint.carry)
        found: list[tuple[Tensor, int]] = []

        def pack(tensor: Tensor) -> None:
            found.append((tensor.detach(), write_count(tensor)))

        with (
            replay_rng(checkpoint.rng, self._checkpoints.device),
            torch.enable_grad(),
            self._autocast(),
            saved_tensors_hooks(pack, _never),
        ):
            self._run_segment(segment.begin, segment.counting, segment.end, carry)
        self._writes = write_counts(self._leaves or [])
        if len(found) != len(segment.writes):
            contract = f"save {len(segment.writes)} tensors for the backward pass in its replay too"
            raise RuntimeError(message(self.op, "step", contract, len(found)))
        if any(now != then for (_, now), then in zip(found, segment.writes, strict=True)):
            raise RuntimeError(_changed(self.op))
        return {index: tensor for index, (tensor, _) in enumerate(found)}


class _Segment:
    """Steps that run again in the backward pass, and the tensors that they save."""

    def __init__(
        self, owner: RecomputedSteps, begin: int, counting: int, end: int, carry: State,
        measure: _Measure | None,
    ) -> None:  # fmt: skip
        self.owner, self.begin, self.counting, self.end = owner, begin, counting, end
        self.measure = measure
        self.requires_grad = [tensor.requires_grad for tensor in tensors(carry)]
        self.writes: list[int] = []  # by which a tensor that has changed since is known
        self.name = object()

    def pack(self, tensor: Tensor) -> int:
        if self.measure is not None:
            self.measure.add(tensor)
        self.writes.append(write_count(tensor))
        return len(self.writes) - 1

    def unpack(self, index: int) -> Tensor:
        return self.owner.unpack(self, index)


class _Measure:
    """The memory of the tensors that steps save, each storage once.

    Parameters are in those of other steps, too, so what one more step adds is its own. The first
    step is no measure: no parameter may be saved that multiplies an input without a gradient.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}  # kept, for memory that is free is used again
        self.before_last = 0

    def add(self, tensor: Tensor) -> None:
        self._held.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    def total(self) -> int:
        return memory(self._held.values())


def memory(given: Collection[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, which they may share."""
    storages = [tensor.untyped_storage() for tensor in given]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Checkpoint(NamedTuple):
    """All that is needed to run from a step on."""

    carry: State  # without a graph
    writes: list[int]
    rng: tuple[Tensor, ...]


class _Checkpoints:
    """Kept checkpoints, from the nearest of which any other is reached again."""

    def __init__(
        self,
        op: str,
        device: torch.device,
        starts: Collection[int],
    ) -> None:
        self.op, self.device = op, device
        self._starts = frozenset(starts)
        self._saved: dict[int, _Checkpoint] = {}
        self._grid: list[int] = [0]
        self._kept: int | None = None  # how many there may be beside `starts`; None: all
        self._first: set[int] = set()  # those of the grid that the first pass keeps

    def follow(self, grid: list[int], kept: int | None) -> None:
        """Keep at most `kept` of the checkpoints of a grid."""
        self._grid, self._kept = grid, kept
        self._first = {grid[n] for n in kept_at_first(len(grid), kept or 0)}

    def save_start(self, step: int, carry: State) -> None:
        """Keep a checkpoint to which `rewind` will go back."""
        if step in self._starts and step not in self._saved:
            self._save(step, carry)

    def save(self, step: int, carry: State) -> None:
        """Keep a checkpoint of the grid, if there is room for it."""
        wanted = self._kept is None or step in self._first or step == 0
        if wanted and step not in self._saved:
            self._save(step, carry)

    def _save(self, step: int, carry: State) -> _Checkpoint:
        carry = detach(carry)
        writes = [write_count(tensor) for tensor in tensors(carry)]
        checkpoint = self._saved[step] = _Checkpoint(carry, writes, rng_state(self.device))
        return checkpoint

    def at(self, step: int, pass_over: Callable[[int, int, State], State]) -> _Checkpoint:
        """The checkpoint before a step: a kept one, or one that is reached again."""
        if self._kept is not None:  # later ones have been used, as a rule, and make room
            for later in [t for t in self._droppable() if t > step]:
                del self._saved[later]
        near = max(t for t in self._saved if t <= step)
        checkpoint = self._intact(near)
        with replay_rng(checkpoint.rng, self.device):
            while near < step:
                between = self._grid[bisect_right(self._grid, near) : bisect_left(self._grid, step)]
                room = max(0, (self._kept or 0) - len(self._droppable()))
                ahead = split(len(between) + 2, room)
                stop = between[ahead - 1] if ahead <= len(between) else step
                checkpoint = self._save(stop, pass_over(near, stop, checkpoint.carry))
                if not room:
                    del self._saved[stop]
                near = stop
        return checkpoint

    def _droppable(self) -> set[int]:
        """Those that are there, but need not be."""
        return self._saved.keys() - self._starts - {0}

    def _intact(self, step: int) -> _Checkpoint:
        checkpoint = self._saved[step]
        if [write_count(tensor) for tensor in tensors(checkpoint.carry)] != checkpoint.writes:
            raise RuntimeError(_changed(self.op))
        return checkpoint


def _changed(op: str) -> str:
    contract = "be those of the forward pass until the backward pass has run"
    return message(op, "parameters, inputs and states", contract, "changed ones")


def _never(_: None) -> Tensor:
    raise AssertionError("the graph of a replay is dropped")


def _autocast_now(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context with the autocast modes of now."""
    modes = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted({"cpu", device.type})
        if torch.amp.is_autocast_available(kind)
    ]
    cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def autocast() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in modes:
                mode = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached)
                stack.enter_context(mode)
            yield

    return autocast
