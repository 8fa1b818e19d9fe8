"""Steps of a recurrence under autograd whose graph keeps no tensors: the backward pass runs them
again, a segment at a time, from checkpoints between segments."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from accumext.loops._checkpoint_plan import SMALLEST, Plan, Sizes, kept_at_first, split
from accumext.recurrence import (
    Checkpoint,
    KeptState,
    Replay,
    State,
    WindowStarts,
    copy_nesting,
    cuts,
    tensors,
    write_counts,
)
from accumext.tensors.torch_private import leaves_since, next_node_number, not_traced

# (step, carry before it, whether its loss counts) -> (carry after it, loss)
Step = Callable[[int, State, bool], tuple[State, Tensor]]
Choose = Callable[[Sizes], Plan]


class RecomputedSteps:
    """Runs the steps of one call of `rollout`."""

    def __init__(
        self,
        kept: KeptState,  # of the functions that `step` calls
        step: Step,
        steps: int,
        device: torch.device,  # dropout draws from its generator and the CPU's
        plan: Plan | None,  # None: `choose` returns it from the sizes of the first steps
        choose: Choose,
        starts: Collection[int] = (),  # steps to which `rewind` will go back
    ) -> None:
        self.steps = steps
        self._step, self._choose = step, choose
        self._replay = Replay(kept, device)
        self._starts = WindowStarts(self._replay, starts)
        self._checkpoints = _Checkpoints(self._replay, starts)
        self._grid: list[int] | None = None  # steps at which segments begin; None: not chosen yet
        # The leaves in the graph of the first step, and their numbers of writes when steps ran
        # last. Replays read them all, while autograd would check saved tensors only.
        self._leaves: list[Tensor] | None = None
        self._writes: list[int] = []
        self._first_node = next_node_number()
        self._measure: _Measure | None = None  # of the first steps
        if plan is not None:
            self._follow(plan, 0)

    def run(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None
    ) -> tuple[State, Tensor | None]:
        """Run steps [begin, end). Return the carry after them, and `total` with the losses of steps
        [counting, end) added."""
        if self._grid is None and end - begin > SMALLEST:
            stop = begin + SMALLEST
            carry, total = self._run_recorded(begin, counting, stop, carry, total, measured=True)
            begin = stop
        for first, stop in cuts(begin, end, self._grid or ()):
            if stop == self.steps:  # the last segment: backward uses it first, so keep its graph
                carry, total = self._run_segment(first, counting, stop, carry, total)
            else:
                carry, total = self._run_recorded(first, counting, stop, carry, total)
        if end == self.steps:
            self._starts.clear()
        else:
            self._replay.note(end, carry)
        return carry, total

    def rewind(self, step: int) -> State:
        """Set generators and hidden state back to those before a step of `starts`. Return the carry
        before it, without a graph."""
        checkpoint = self._starts.at(step)
        assert checkpoint is not None
        self._replay.go_back(checkpoint)
        return copy_nesting(checkpoint.state)

    def _run_segment(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None = None
    ) -> tuple[State, Tensor | None]:
        """Run steps as `run` does, with a graph that keeps its tensors. Losses are added one by
        one, for some of torch's means share the memory of all their terms."""
        for t in range(begin, end):
            self._starts.save(t, carry)
            self._replay.compare(t, carry)
            if self._measure is not None:
                self._measure.before_last = self._measure.total()
            carry, loss = self._step(t, carry, t >= counting)
            if self._leaves is None and torch.is_grad_enabled():
                self._leaves = leaves_since(self._first_node, [loss, *tensors(carry)])
            if t >= counting:
                total = loss if total is None else total + loss
        self._writes = write_counts(self._leaves or [])
        return carry, total

    def _run_recorded(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None,
        measured: bool = False,
    ) -> tuple[State, Tensor | None]:  # fmt: skip
        self._checkpoints.save(begin, carry)
        self._measure = sizes = _Measure() if measured else None
        carry, total = self._replay.record(
            partial(self._run_segment, begin, counting, end, total=total), carry,
            checked=itemgetter(0), start=partial(self._start_again, begin),
            measure=None if sizes is None else sizes.add,
        )  # fmt: skip
        self._measure = None
        if sizes is not None:
            generators = self._replay.checkpoint(None).rng or ()
            state = tensors(carry[1])
            graph = sizes.total() - sizes.before_last
            size = memory([*tensors(carry), *generators])
            self._follow(self._choose(Sizes(size, memory(state), graph)), end)
        return carry, total

    def _follow(self, plan: Plan, begin: int) -> None:
        """Set segments from `begin` on. All have the plan's length but the first, which may be
        shorter: the last one, which does not run again, is to be long."""
        self._grid = sorted({0, begin, *range(self.steps - plan.length, begin, -plan.length)})
        self._checkpoints.follow(self._grid[:-1], plan.kept)  # the last segment does not run again

    def _pass_over(self, begin: int, end: int, carry: State) -> State:
        """Run steps, and return the carry before step `end` without a graph. If their hidden state
        has graphs, they run under autograd, so that it requires gradients as in the forward pass.
        """
        not_traced(_save_nothing)
        with (
            torch.set_grad_enabled(self._replay.kept.keeps_graphs), self._replay.modes(),
            saved_tensors_hooks(_save_nothing, _save_nothing),
        ):  # fmt: skip
            return self._run_segment(begin, end, end, copy_nesting(carry))[0]

    def _start_again(self, begin: int) -> Checkpoint:
        """Return the checkpoint from which a segment runs again."""
        self._replay.check_unwritten(self._leaves or [], self._writes)
        return self._checkpoints.at(begin, self._pass_over)


class _Measure:
    """The memory of the tensors that steps save, with each storage counted once.

    All steps save the parameters, so the memory that one more step adds is that of its own tensors.
    The first step is no measure: autograd may save no parameter that multiplies its input, if that
    needs no gradient.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}  # kept alive, or new storages could reuse addresses
        self.before_last = 0

    def add(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided:  # others have no storage
            self._held.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    def total(self) -> int:
        return memory(self._held.values())


def memory(given: Collection[Tensor]) -> int:
    """Return the bytes of the tensors' storages, with shared ones counted once."""
    storages = [tensor.untyped_storage() for tensor in given]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Checkpoints:
    """Kept checkpoints. Any other checkpoint is computed again from the nearest earlier one."""

    def __init__(self, replay: Replay, starts: Collection[int]) -> None:
        self._replay = replay
        self._starts = frozenset(starts)
        self._saved: dict[int, Checkpoint] = {}
        self._grid: list[int] = [0]  # first steps of the segments that run again
        self._kept: int | None = None  # how many may be kept, not counting `starts`; None: all
        self._first: set[int] = set()  # steps of the grid whose checkpoints the first pass keeps

    def follow(self, grid: list[int], kept: int | None) -> None:
        """Keep at most `kept` of the checkpoints of a grid."""
        self._grid, self._kept = grid, kept
        self._first = {grid[n] for n in kept_at_first(len(grid), kept or 0)}

    def save(self, step: int, carry: State) -> None:
        """Keep a checkpoint of the grid if there is room for it, or a window begins with it."""
        wanted = self._kept is None or step in self._first or step in self._starts or step == 0
        if wanted and step not in self._saved:
            self._save(step, carry)

    def _save(self, step: int, carry: State) -> Checkpoint:
        checkpoint = self._saved[step] = self._replay.checkpoint(carry)
        return checkpoint

    def at(self, step: int, pass_over: Callable[[int, int, State], State]) -> Checkpoint:
        """Return the checkpoint before a step: a kept one, or one that is computed again."""
        if self._kept is not None:  # backward has used later ones, as a rule: make room
            for later in [t for t in self._droppable() if t > step]:
                del self._saved[later]
        near = max(t for t in self._saved if t <= step)
        checkpoint = self._saved[near]
        if near == step:
            return checkpoint
        with self._replay.running_from(checkpoint):
            while near < step:
                between = self._grid[bisect_right(self._grid, near) : bisect_left(self._grid, step)]
                room = max(0, (self._kept or 0) - len(self._droppable()))
                ahead = split(len(between) + 2, room)
                stop = between[ahead - 1] if ahead <= len(between) else step
                checkpoint = self._save(stop, pass_over(near, stop, checkpoint.state))
                if not room:
                    del self._saved[stop]
                near = stop
        return checkpoint

    def _droppable(self) -> set[int]:
        """Return the steps whose checkpoints may be dropped."""
        return self._saved.keys() - self._starts - {0}


def _save_nothing(_: Any) -> Any:
    """Save nothing: a hook for saved tensors of a graph through which no gradient flows."""
