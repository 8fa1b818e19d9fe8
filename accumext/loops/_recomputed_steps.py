"""Steps of a recurrence under autograd. Either their graph is kept, or it keeps no tensors and the
backward pass runs them again, a segment at a time, from checkpoints between segments."""

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
from accumext.loops._kept_graph import KeptGraph
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
        kept_graph: KeptGraph | None = None,  # the graph is kept as long as this says that it fits
    ) -> None:
        self.steps = steps
        self.recomputed = False  # whether the backward pass runs steps again
        self._step, self._choose = step, choose
        self._replay = Replay(kept, device)
        self._starts = WindowStarts(self._replay, starts)
        self._checkpoints = _Checkpoints(self._replay, starts)
        self._grid: list[int] | None = None  # steps at which segments begin; None: not chosen yet
        # The leaves in the graph of the first steps, and their numbers of writes when steps ran
        # last. Replays read them all, while autograd would check saved tensors only.
        self._leaves: list[Tensor] | None = None
        self._writes: list[int] = []
        self._first_node = next_node_number()
        self._kept_graph = kept_graph
        self._saved_bytes: Callable[[], int] | None = None  # of steps that are being measured
        self._saved_before_last = 0  # the same before the last step
        if plan is not None:
            self._follow(plan, 0, 0)

    def run(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None
    ) -> tuple[State, Tensor | None]:
        """Run steps [begin, end). Return the carry after them, and `total` with the losses of steps
        [counting, end) added."""
        while self._kept_graph is not None and begin < end:
            ahead, measured = self._kept_graph.ahead()
            stop = min(end, begin + ahead)
            if measured:
                carry, total = self._run_measured(begin, counting, stop, carry, total)
            else:
                carry, total = self._run_segment(begin, counting, stop, carry, total)
                self._kept_graph.add(stop - begin)
            begin = stop
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
            if self._saved_bytes is not None:
                self._saved_before_last = self._saved_bytes()
            carry, loss = self._step(t, carry, t >= counting)
            if self._leaves is None and self._kept_graph is None and torch.is_grad_enabled():
                self._leaves = leaves_since(self._first_node, [loss, *tensors(carry)])
            if t >= counting:
                total = loss if total is None else total + loss
        self._writes = write_counts(self._leaves or [])
        return carry, total

    def _run_measured(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None
    ) -> tuple[State, Tensor | None]:
        """Run steps with a graph that is kept, and measure it. If the graph of all steps does not
        fit, further steps are recorded."""
        assert self._kept_graph is not None
        with self._replay.measuring(()) as sizes:
            self._saved_bytes = lambda: sum(sizes.values())
            carry, total = self._run_segment(begin, counting, end, carry, total)
        assert total is not None
        if not self._kept_graph.fits(end - begin, self._bytes_of_last_step(), total.device):
            self._choose_plan(carry, self._kept_graph.largest_step, end, end)
            self._kept_graph = None
        return carry, total

    def _run_recorded(
        self, begin: int, counting: int, end: int, carry: State, total: Tensor | None,
        measured: bool = False,
    ) -> tuple[State, Tensor | None]:  # fmt: skip
        self.recomputed = True
        self._checkpoints.save(begin, carry)
        saved = _Saved() if measured else None
        self._saved_bytes = None if saved is None else saved.total
        carry, total = self._replay.record(
            partial(self._run_segment, begin, counting, end, total=total), carry,
            checked=itemgetter(0), start=partial(self._start_again, begin),
            measure=None if saved is None else saved.add,
        )  # fmt: skip
        if saved is not None:
            self._choose_plan(carry, self._bytes_of_last_step(), 0, end)
        return carry, total

    def _bytes_of_last_step(self) -> int:
        """Return what the last of the measured steps has saved."""
        assert self._saved_bytes is not None
        step_bytes, self._saved_bytes = self._saved_bytes() - self._saved_before_last, None
        return step_bytes

    def _choose_plan(self, carry: State, graph: int, first: int, begin: int) -> None:
        generators = self._replay.checkpoint(None).rng or ()
        size = memory([*tensors(carry), *generators])
        self._follow(self._choose(Sizes(size, memory(tensors(carry[1])), graph)), first, begin)

    def _follow(self, plan: Plan, first: int, begin: int) -> None:
        """Set segments from `begin` on; steps from `first` on run again. All have the plan's length
        but the first, which may be shorter: the last one, which does not run again, is to be long.
        """
        self._grid = sorted({first, begin, *range(self.steps - plan.length, begin, -plan.length)})
        self._checkpoints.follow(first, self._grid[:-1], plan.kept)

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


class _Saved:
    """The tensors that steps would save, with each storage counted once.

    All steps save the parameters, so the memory that one more step adds is that of its own tensors.
    The first step is no measure: autograd may save no parameter that multiplies its input, if that
    needs no gradient.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}  # kept alive, or new storages could reuse addresses

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
        self._always = {0, *starts}  # steps whose checkpoints are always kept
        self._saved: dict[int, Checkpoint] = {}
        self._grid: list[int] = [0]  # first steps of the segments that run again
        self._kept: int | None = None  # how many others may be kept; None: all
        self._first: set[int] = set()  # steps of the grid whose checkpoints the first pass keeps

    def follow(self, first: int, grid: list[int], kept: int | None) -> None:
        """Keep the checkpoint before step `first`, and at most `kept` others of a grid."""
        self._always.add(first)
        self._grid, self._kept = grid, kept
        self._first = {grid[n] for n in kept_at_first(len(grid), kept or 0)}

    def save(self, step: int, carry: State) -> None:
        """Keep a checkpoint of the grid if there is room for it, or a window begins with it."""
        wanted = self._kept is None or step in self._first or step in self._always
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
        return self._saved.keys() - self._always


def _save_nothing(_: Any) -> Any:
    """Save nothing: a hook for saved tensors of a graph through which no gradient flows."""
