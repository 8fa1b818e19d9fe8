"""The steps of optimizers: which are followed, which gradients they use, and when it is enough."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cached_property
from time import perf_counter
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, optimizer

from accumext import AccumulatingOptimizer
from accumext.auditing._events import Call, Event, HalfSum, Stepped
from accumext.auditing._followed import Followed, Used, ours_in, parameters_of, unwrapped
from accumext.auditing._lines import frames, line
from accumext.auditing._modules import optimizers
from accumext.auditing._passes import Parameters, Passes, stands_for
from accumext.auditing._torch_private import runs_hooks

_OF_WRAPPER = {AccumulatingOptimizer.step.__code__, AccumulatingOptimizer.flush.__code__}
_FOR_OTHERS = 4  # times `windows`: how long to wait for optimizers that step less often


class Done(BaseException):
    """All windows are closed; not an Exception, which loops catch."""


class Journal:
    """The events, until enough windows are closed. Each event is made when the audit closes, so
    that nothing is read from a device before."""

    def __init__(self, known: Parameters) -> None:
        self.watching = True
        self._known = known
        self._drafts: list[Callable[[], Event | None]] = []

    def write(self, event: Callable[..., Event | None], **fields: Any) -> None:
        """Keep a function that will make an event, with its line, its time and known fields."""
        if self.watching:
            self._drafts.append(functools.partial(event, line(), perf_counter(), **fields))

    def write_call(
        self, name: str, about: Iterable[Tensor] = (), of: Callable[[], int | None] = lambda: None
    ) -> None:
        """Keep a call; its parameters, and the number of its optimizer, may become known later."""
        known, tensors = self._known, list(about)
        self.write(lambda where, time: Call(where, time, name, known.among(tensors), of()))

    def events(self) -> tuple[Event, ...]:
        return tuple(event for draft in self._drafts if (event := draft()) is not None)


class Steps:
    """The steps of one chosen optimizer, of all that step, or only of the one with this number."""

    def __init__(
        self, journal: Journal, known: Parameters, passes: Passes, wrapper: Any, windows: int,
        stops: bool, number: int | None,
    ) -> None:  # fmt: skip
        self._journal, self._known, self._passes = journal, known, passes
        self._windows, self._stops, self._number = windows, stops, number
        self.followed: list[Followed] = []
        self.met: dict[int, Any] = {}  # optimizers by id, in the order in which they stepped
        self.taken = Counter[tuple[int, str]]()  # steps of all optimizers, by id and class
        self.trained: dict[int, Tensor] = {}  # all that were stepped on, by id
        # Parameters that graphs use, by id, and the steps before their first and their last use.
        self.leaves: dict[int, tuple[Tensor, int, int]] = {}
        self.alive: list[Optimizer] = []  # at the end; empty if all have stepped
        self.through_scaler = False
        self._running: list[FrameType] = []  # frames of calls of `step`
        self.chosen = None if wrapper is None else self._follow(wrapper)

    def open(self, stack: ExitStack) -> None:
        """Watch steps until the stack is closed."""
        stack.callback(optimizer.register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(optimizer.register_optimizer_step_post_hook(self._after_step).remove)

    def close(self) -> None:
        every = (*self._known.tensors, *(leaf for leaf, _, _ in self.leaves.values()))
        left = [t for t in every if t.requires_grad and id(t) not in self.trained]
        if self._journal.watching and left:  # a look at all objects takes as long as a pass
            self.alive = optimizers()
        self._journal.watching = False
        self._passes.close()
        self._running.clear()

    @cached_property
    def optimized(self) -> frozenset[int]:
        """The ids of the parameters of optimizers that have stepped, or were alive at the end."""
        waiting = (tensor for one in self.alive for tensor in parameters_of(one))
        return frozenset(id(stands_for(t)) for t in (*self.trained.values(), *waiting))

    def fill(self) -> None:
        """Note that a pass has left gradients."""
        for one in self.followed:
            one.filled = one.wrapper is None

    def notice_clears(self, told: bool = False) -> None:
        """Write down that gradients are gone, unless `told`: then `zero_grad` was written down."""
        for one in self.followed:
            if one.filled and all(tensor.grad is None for tensor in one.tensors()):
                one.filled = False
                if not told:
                    self._journal.write_call("zero_grad", one.tensors())

    def know(self) -> None:
        """Number the parameters of followed optimizers, which may have been given more."""
        for one in self.followed:
            for tensor in one.tensors():
                self._known.add(tensor)

    def find(self, wrapper: Any) -> Followed | None:
        """Return the followed optimizer that is in these wrappers; None if it is not followed."""
        stepping, chosen = unwrapped(wrapper), self.chosen
        self.met.setdefault(id(stepping), stepping)
        found = next((one for one in self.followed if one.optimizer is stepping), None)
        if found is not None:
            return found
        if chosen is None:
            wanted = self._number in (None, list(self.met).index(id(stepping)))
            return self._follow(wrapper) if wanted else None
        if runs_hooks(chosen.optimizer):
            return None
        same = {id(t) for t in chosen.tensors()} == {id(t) for t in parameters_of(wrapper)}
        return chosen if same else None  # steps in place of the chosen one

    def number_of(self, wrapper: Any) -> int | None:
        """Return the number of the optimizer in these wrappers; None if it is not followed."""
        stepping = unwrapped(wrapper)
        return next((one.number for one in self.followed if one.optimizer is stepping), None)

    def _follow(self, wrapper: Any) -> Followed:
        one = Followed(unwrapped(wrapper), len(self.followed))
        self._wrap(one, ours_in(wrapper))
        self.followed.append(one)
        return one

    def _wrap(self, one: Followed, wrapper: AccumulatingOptimizer | None) -> None:
        one.wrap(wrapper)
        if one.wrapper is not None:
            self._passes.sum_nothing()

    def settle(self) -> None:
        """Complete the last window of a wrapper, whose report has its clip, or says it skipped."""
        for one in self.followed:
            if self._journal.watching and one.take_report():
                if one.used is None:
                    self.write(one, None)
                one.used = None
                self._count(one)

    def _count(self, one: Followed) -> None:
        one.windows += 1
        counts = [one.windows for one in self.followed if one.windows]
        if max(counts) >= _FOR_OTHERS * self._windows or min(counts) >= self._windows:
            self.close()
            if self._stops:
                here = threading.current_thread() is threading.main_thread()
                raise Done if here else SystemExit  # which ends a thread without a traceback

    def _before_step(self, stepping: Any, args: Any, kwargs: Any) -> Any:
        if not self._journal.watching:
            return None
        running = frames()
        self._running = [call for call in self._running if call in running]
        self._running.append(running[1])
        if len(self._running) > 1:  # an optimizer steps another, of the same parameters
            return None
        one = self.find(stepping)
        self.taken[id(stepping), type(stepping).__name__] += 1
        for tensor in parameters_of(stepping):
            self.trained[id(tensor)] = tensor
            self._known.add(tensor)
        if one is None:
            return None
        self._wrap(one, _around(stepping, running))
        return self._before_own_step(one, args, kwargs)

    def _before_own_step(self, one: Followed, args: Any, kwargs: Any) -> Any:
        self.settle()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        one.closures = 0
        if not callable(closure):
            self._take_used(one)
            return None

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            one.closures += 1
            self._take_used(one)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _take_used(self, one: Followed) -> None:
        one.used = Used(self._known.take(one.tensors()), one.optimizer)

    def _after_step(self, stepping: Any, args: Any, kwargs: Any) -> None:
        running = frames()
        if not (self._journal.watching and running[1] in self._running):
            return
        del self._running[self._running.index(running[1]) :]
        if self._running:
            return
        one = self.find(stepping)
        if one is None:
            self._journal.write_call("step", parameters_of(stepping))
        elif one.used is not None:
            self.write(one, one.used)

    def write(self, one: Followed, used: Used | None) -> None:
        """Write down a step with the gradients it used; None: skipped. A wrapper's clip follows."""
        known, window = self._known, one.windows
        sums = self._passes.half_sums() if used else []

        def stepped(where: str, time: float, **fields: Any) -> Stepped:
            rows = len(known.tensors)
            return Stepped(
                where,
                time,
                used=None if used is None else used.gradient(rows),
                left=None if used is None else used.left.on_host(rows),
                factor=one.clip_of(window),
                half_sums=tuple(HalfSum(*map(float, row)) for row in sums if row[2]),
                **fields,
            )

        self._journal.write(
            stepped,
            optimizer=one.number,
            present=frozenset(used.left.present if used else ()),
            through_scaler=self.through_scaler,
            closure_calls=one.closures,
        )
        if one.wrapper is None:
            one.used = None
            self._count(one)


def _around(stepping: Any, running: list[FrameType]) -> AccumulatingOptimizer | None:
    """Return the wrapper that steps an optimizer, if one does, so that nobody has to name it."""
    callers = (call.f_locals["self"] for call in running if call.f_code in _OF_WRAPPER)
    return next((caller for caller in callers if unwrapped(caller) is stepping), None)
