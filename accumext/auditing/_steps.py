"""The steps of optimizers: which are followed, what each has used, and when there are enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import optimizer

from accumext import AccumulatingOptimizer
from accumext.auditing._events import Call, Event, HalfSum, Stepped
from accumext.auditing._followed import Followed, Used, parameters_of, unwrapped
from accumext.auditing._lines import calls, line
from accumext.auditing._passes import Parameters, Passes
from accumext.auditing._torch_private import runs_hooks

_OF_WRAPPER = {AccumulatingOptimizer.step.__code__, AccumulatingOptimizer.flush.__code__}
_FOR_OTHERS = 4  # times as many windows are waited for until other optimizers have theirs


class Done(BaseException):
    """All windows are closed; not an Exception, which loops catch."""


class Journal:
    """The events, until enough windows are closed."""

    def __init__(self) -> None:
        self.watching = True
        self._drafts: list[Callable[[], Event | None]] = []

    def write(
        self, event: type[Event], only_if: Callable[[], bool] | None = None, **fields: Any
    ) -> None:
        """Keep an event; what is a function is asked when the audit closes."""
        where, time = line(), perf_counter()

        def draft() -> Event | None:
            if only_if is not None and not only_if():
                return None
            return event(where, time, **{k: v() if callable(v) else v for k, v in fields.items()})

        if self.watching:
            self._drafts.append(draft)

    def events(self) -> tuple[Event, ...]:
        return tuple(event for draft in self._drafts if (event := draft()) is not None)


class Steps:
    """Of one chosen optimizer, or of all that step, or of those the one of this number alone."""

    def __init__(
        self, journal: Journal, known: Parameters, passes: Passes, wrapper: Any, windows: int,
        stops: bool, number: int | None,
    ) -> None:  # fmt: skip
        self._journal, self._known, self._passes = journal, known, passes
        self._windows, self._stops, self._number = windows, stops, number
        self._by_id: dict[int, Followed] = {}  # of the innermost optimizer
        self._met: dict[int, tuple[int, Any]] = {}  # by id, in the order in which they stepped
        self.chosen = None if wrapper is None else Followed(wrapper, 0)
        self.taken = Counter[tuple[int, str]]()  # steps of all optimizers
        self.trained: dict[int, Tensor] = {}  # by id, the parameters of all that have stepped
        self.through_scaler = False
        self._running: list[FrameType] = []  # calls of `step`
        if self.chosen is not None:
            self._by_id[id(self.chosen.optimizer)] = self.chosen
            self._leave_sums(self.chosen)

    def open(self, stack: ExitStack) -> None:
        """Watch, until the stack is closed."""
        stack.callback(optimizer.register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(optimizer.register_optimizer_step_post_hook(self._after_step).remove)

    def close(self) -> None:
        self._journal.watching = False
        self._passes.close()
        self._running.clear()

    @property
    def followed(self) -> list[Followed]:
        return sorted(self._by_id.values(), key=lambda one: one.number)

    @property
    def number(self) -> int:
        """Of all steps so far."""
        return sum(self.taken.values())

    def fill(self) -> None:
        """A pass has left gradients."""
        for one in self.followed:
            one.filled = one.wrapper is None

    def notice_clears(self, told: bool = False) -> None:
        """Write down that gradients have gone, however that was done; `told`: by `zero_grad`."""
        for one in self.followed if self._journal.watching else []:
            if one.filled and all(tensor.grad is None for tensor in one.tensors()):
                one.filled, about = False, one.tensors()
                if not told:
                    self._write_call("zero_grad", about)

    def _write_call(self, name: str, about: list[Tensor]) -> None:
        self._journal.write(Call, name=name, parameters=lambda: self._known.among(about))

    def know(self) -> None:
        """Number the parameters of those followed, which may have become more."""
        for one in self.followed:
            for tensor in one.tensors():
                self._known.add(tensor)

    def follow(self, wrapper: Any) -> Followed | None:
        """What is known of an optimizer, in a wrapper or not; None if it is not followed."""
        found, chosen = self._by_id.get(id(unwrapped(wrapper))), self.chosen
        if found is None and chosen is not None and not runs_hooks(chosen.optimizer):
            own = {id(t) for t in chosen.tensors()}
            return chosen if own == {id(t) for t in parameters_of(wrapper.param_groups)} else None
        if found is None and chosen is None and self._is_wanted(unwrapped(wrapper)):
            found = Followed(wrapper, len(self._by_id))
            self._by_id[id(found.optimizer)] = found
            self._leave_sums(found)
        return found

    def _is_wanted(self, stepping: Any) -> bool:
        place, _ = self._met.setdefault(id(stepping), (len(self._met), stepping))
        return self._number in (None, place)

    def _leave_sums(self, one: Followed) -> None:
        if one.wrapper is not None:
            self._passes.sum_nothing()

    def settle(self) -> None:
        """Complete the last window of a wrapper, which tells its clip, or that it skipped."""
        for one in self.followed:
            if self._journal.watching and one.reported():
                if one.used is None:
                    self.write(one, None)
                one.take_report()
                one.used = None
                self._count(one)

    def _count(self, one: Followed) -> None:
        one.windows += 1
        counts = {one.number: one.windows for one in self.followed if one.windows}
        most = max(counts.values()) >= _FOR_OTHERS * self._windows
        if most or min(counts.values()) >= self._windows:
            self.close()
            if self._stops:
                raise Done

    def _before_step(self, stepping: Any, args: Any, kwargs: Any) -> Any:
        if not self._journal.watching:
            return None
        running = calls()
        self._running = [call for call in self._running if call in running]
        inside = bool(self._running)
        self._running.append(running[1])
        if inside:  # an optimizer steps another, of the same parameters
            return None
        self.taken[id(stepping), type(stepping).__name__] += 1
        for tensor in parameters_of(stepping.param_groups):
            self.trained[id(tensor)] = tensor
            self._known.add(tensor)
        one = self.follow(stepping)
        if one is None:
            return None
        one.wrap(_around(stepping, running))
        self._leave_sums(one)
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
        running = calls()
        if not (self._journal.watching and running[1] in self._running):
            return
        del self._running[self._running.index(running[1]) :]
        if self._running:
            return
        one = self.follow(stepping)
        if one is None:
            self._write_call("step", parameters_of(stepping.param_groups))
        elif one.used is not None:
            self.write(one, one.used)
            if one.wrapper is None:
                one.used = None

    def write(self, one: Followed, used: Used | None) -> None:
        """A step that used gradients, or that was skipped."""
        known = self._known
        sums = [] if used is None else self._passes.half_sums()
        self._journal.write(
            Stepped,
            optimizer=one.number,
            used=lambda: None if used is None else used.gradient(len(known.tensors)),
            left=lambda: None if used is None else used.left.on_host(len(known.tensors)),
            present=frozenset() if used is None else frozenset(used.left.present),
            factor=one.begin(),
            skipped=lambda: used is None or used.skipped(),
            through_scaler=self.through_scaler,
            closure_calls=one.closures,
            half_sums=lambda: tuple(HalfSum(*map(float, row)) for row in sums if row[2]),
        )
        if one.wrapper is None:
            self._count(one)


def _around(stepping: Any, running: list[FrameType]) -> AccumulatingOptimizer | None:
    """The wrapper that steps an optimizer, if one does: nobody has to name it."""
    callers = (call.f_locals["self"] for call in running if call.f_code in _OF_WRAPPER)
    return next((caller for caller in callers if unwrapped(caller) is stepping), None)
