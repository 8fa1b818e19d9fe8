"""The engine of one optimizer: its parts, and the only place where its state is replaced."""

from __future__ import annotations

import atexit
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from threading import get_ident
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accumext.master_weights import SteppedTensors
from accumext.ops.wgrad_fusion import MainGrads
from accumext.optimizer._grads import ConsumedGrads, clear_grads, is_none, note_gone
from accumext.optimizer._report import Name, WindowReport
from accumext.optimizer._settings import OP, Settings
from accumext.optimizer._window import NO_WINDOW, Phase, State, Window
from accumext.tensors.checks import message, users_level
from accumext.tensors.kinds import HALF_DTYPES, Group
from accumext.tensors.scalars import Scalar

ALIVE: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # by id

# Engines whose `backward` has ever left gradients in `.grad`, which others of these parameters must
# see: `len(LEAVING) > engine.leaves` asks whether there is one besides this engine.
LEAVING: WeakValueDictionary[int, Engine] = WeakValueDictionary()


def engines_alive(among: WeakValueDictionary[int, Engine] = ALIVE) -> list[Engine]:
    """Return the engines of all optimizers, also while other threads create some."""
    return [engine for reference in among.valuerefs() if (engine := reference()) is not None]


def others_of(engine: Engine) -> list[Engine]:
    """Return the engines of other optimizers that have accumulated gradients of its parameters."""
    mine = set(map(id, engine.tensors.parameters()))
    return [
        other
        for other in engines_alive()
        if other is not engine
        and (other.state.micro_batches or other.state.last)
        and not mine.isdisjoint(map(id, other.tensors.parameters()))
    ]


@atexit.register
def _warn_at_exit() -> None:
    for engine in engines_alive():
        engine.warn_of_loss()


# The methods that cannot be called in a phase, and the error: the contract of the call, what it
# got, and the advice. "take": `step`, `flush` or the end of `micro_batch()` finds gradients of the
# user's own passes in `.grad`.
_SENT = (
    {"backward", "accumulate", "micro_batch", "take", "accumulation_state_dict", "__getstate__"},
    (
        "come after step or discard",
        "one for a window that is summed over processes already",
        "With reduce_in_backward=True a micro-batch has one backward pass",
    ),
)
_REFUSED: dict[Phase, tuple[set[str], tuple[str, ...]]] = {
    Phase.INSIDE: (
        {"accumulate", "micro_batch", "step", "flush", "discard", "load_accumulation_state_dict"},
        ("be outside micro_batch()", "one inside"),
    ),
    Phase.SENDING: _SENT,
    Phase.SUMMED: _SENT,
}
_ADDS = {"backward", "accumulate", "micro_batch"}


class Policy(NamedTuple):
    """What an inf or NaN in a micro-batch does, as `on_nonfinite` says."""

    # Takes (window, gradients, weight, loss scale, base of the weights, flag of a check). Returns a
    # function of a list, which adds them as a micro-batch: each kernel appends its norm to the list
    # as it runs. Called with the list again, after an exception, it runs the remaining kernels.
    adding: Callable[..., Callable[[list[Tensor]], Window]]
    # Takes a window of phase IN_GRAD, and the parameters; returns it with sums of its own.
    out_of_grad: Callable[[Window, Sequence[Tensor]], Window]
    # Takes a window whose only micro-batch was in `.grad`; returns it with `Ledger.counted` set: 1,
    # or 0 if the micro-batch is not finite.
    counted: Callable[[Window], Window] | None = None
    # Raises for a micro-batch that may not be added: (engine, op, gradients, weight, base).
    check: Callable[..., None] | None = None
    apart: bool = False  # a micro-batch is checked before it is added, in a second set of gradients
    leaves_out: bool = False  # one that is not finite counts nowhere
    looks: bool = True  # else a step is left out only if a GradScaler has found an inf or NaN


class Reducer(ABC):
    """Sums the window over processes. Methods that only one subclass needs do nothing here."""

    group: Group | None = None  # processes that the window is summed over
    sharded = False  # FSDP averages gradients; losses are multiplied by weight / base_weight
    base_weight: Scalar | None = None  # None unless sharded
    checked: tuple[Settings, Tensor] | None = None  # settings found equal everywhere; as numbers

    @property
    @abstractmethod
    def shared(self) -> bool:
        """Tell whether other processes share the window."""

    @abstractmethod
    def close(self, op: str, engine: Engine, flushing: bool) -> bool:
        """Sum the open window over the processes; return False if no process has anything in it."""

    def begin(self, op: str, engine: Engine) -> None:
        """Prepare for a micro-batch; raise if its gradients cannot be added to the window."""

    def agreed(self, agreed: Any) -> None:
        """Record the numbers of all processes."""

    def closed(self) -> None:
        """Record that all processes have closed a window."""

    def collect(self, op: str, engine: Engine) -> None:
        """Add to the window the gradients that FSDP holds."""

    def drop(self) -> None:
        """Drop the gradients that FSDP holds. May be called again after an exception."""

    def refuse_while_held(self, op: str) -> None:
        """Raise for an operation that needs the window's gradients while FSDP holds them."""

    def holding(
        self, op: str, engine: Engine, model: nn.Module | None
    ) -> AbstractContextManager[None]:
        """Return the context of a micro-batch of this model."""
        return nullcontext()

    def share(self, group: Group | None) -> None:
        """Sum windows over this group from here on; None keeps the present group."""
        if group is not None:
            self.group = None if group.size() == 1 else group

    def copy(self) -> Reducer:
        """Return a reducer for a copied optimizer, which has only the group of its settings."""
        new = copy(self)
        new.group = new.checked = None
        return new


class Engine:
    """The parts of an AccumulatingOptimizer. One object, never replaced, because trainers copy the
    attributes of an optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        settings: Settings,
        target: SteppedTensors,
        policy: Policy,
        reducer: Reducer,
        watch: Any,
    ) -> None:
        self.optimizer = optimizer  # the wrapped one
        self.tensors = target  # what it steps on
        self.state = State()
        self.settings = settings
        self.policy = policy
        self.reducer = reducer
        reducer.share(settings.process_group)
        self.warned = set[str]()  # topics of warnings that were given
        self.watch = watch  # the Watch of the first windows, then None
        self.main_grads = MainGrads(self, target.parameters())
        self.thread = get_ident()  # the thread that created it, or used it last
        self.leaves = False  # whether it is one of LEAVING
        ALIVE[id(self)] = self

    def __getstate__(self) -> dict[str, Any]:
        op = f"{OP}.__getstate__"
        self.refuse(op)
        self.reducer.refuse_while_held(op)
        group: Any = self.settings.process_group
        if group is not None and group is not dist.group.WORLD:
            contract = "be the default group to be copied or pickled"
            raise RuntimeError(message(OP, "process_group", contract, "another"))
        group = None if group is None else "default"
        window = self.window_out_of_grad()
        state = State(  # copies come without `.grad`, and share no model's group
            window=window,
            last=self.state.last,
            stepped=self.state.stepped,
            accumulated=self.state.accumulated,
            through_backward=self.state.through_backward,
            saved=window.ledger.micro_batches,  # the original is there to step on them
        )
        gone = dict.fromkeys(("main_grads", "watch"))
        settings = self.settings._replace(process_group=group)
        mine = {"settings": settings, "state": state, "reducer": self.reducer.copy()}
        return {**vars(self), **mine, **gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.settings.process_group is not None:  # the default group of this process
            self.settings = self.settings._replace(process_group=dist.group.WORLD)
        self.reducer.share(self.settings.process_group)
        self.main_grads = MainGrads(self, self.tensors.parameters())
        self.thread, self.leaves = get_ident(), False
        ALIVE[id(self)] = self

    def __del__(self) -> None:
        # At the end of a program this module may be gone before its objects.
        if sys is not None and not sys.is_finalizing() and "state" in vars(self):
            self.warn_of_loss()
            if any(self.state.consumed.ours):
                note_gone(self.state.consumed, self.tensors.parameters())

    # The state

    def update(self, **changes: Any) -> None:
        """Replace parts of the state."""
        self.state = self.state._replace(**changes)

    def begin_next(self, used: ConsumedGrads, report: WindowReport) -> None:
        """Begin the next window, after the step that this report is of."""
        self.state = self.state._replace(
            window=NO_WINDOW, consumed=used, accumulated=False, last=report, stepped=True
        )

    def commit(self, state: State, emptied: Sequence[Tensor] = (), drops: bool = False) -> None:
        """Replace the state, empty `.grad` of these parameters, and with `drops` drop what the
        reducer holds. After an exception all of that is done, or nothing."""

        def rest() -> None:
            clear_grads(emptied)
            if drops:
                self.reducer.drop()

        try:
            self.state = state
            rest()
        except BaseException:
            if self.state is state:
                rest()
            raise

    def drop(self, successor: Window = NO_WINDOW) -> None:
        """Start another window. A sum over processes that has begun is finished: others wait."""
        state = self.state
        after = state._replace(
            window=successor, micro_batch=None, sending=None, accumulated=False, other_pass=None
        )
        self.commit(after, self.tensors.parameters() if state.in_grad else (), drops=True)
        if state.sending is not None:
            state.sending.buckets.abandon()

    def refuse(self, op: str, method: str | None = None) -> None:
        """Raise if a method cannot be called in the phase of the window, or adds gradients for an
        optimizer that needs a closure."""
        method = method or op.rpartition(".")[2]
        for phase in self.state.phases():
            methods, sentence = _REFUSED.get(phase, ((), ()))
            if method in methods:
                raise RuntimeError(message(op, "the call", *sentence))
        if self.settings.needs_closure and method in _ADDS:
            kind = type(self.optimizer).__name__
            advice = "Call loss.backward() in the closure, and opt.step(closure)"
            raise RuntimeError(message(op, "the optimizer", "step without a closure", kind, advice))

    def window_out_of_grad(self) -> Window:
        """Return the open window with its sums in `sums`, which may share memory with `.grad`."""
        out = self.state.window.out_of_grad(self.tensors.parameters())
        counted = self.policy.counted
        return out if counted is None or not self.state.in_grad else counted(out)

    def forget_evidence(self) -> None:
        """Note that gradients change: the last report must not look for inf or NaN in them."""
        if self.state.last is not None:
            self.state.last.evidence = None

    # Parameters and sums

    def names(self) -> dict[Tensor, Name]:
        """Return names of parameters and masters, or indices if the optimizer has no names."""
        names: list[Name] = []
        for group in self.optimizer.param_groups:
            indices = range(len(names), len(names) + len(group["params"]))
            given = group.get("param_names")
            named = isinstance(given, (list, tuple)) and len(given) == len(indices)
            names += cast(list[Name], given) if named else indices
        lists = self.tensors.parameters(), self.tensors.stepped_on()
        return {p: name for several in lists for p, name in zip(several, names, strict=True)}

    @property
    def next_is_all(self) -> bool:
        """True if the next micro-batch is all that the window will hold."""
        one = self.settings.window == 1 and self.reducer.group is None
        return one and not self.state.window.ledger.micro_batches

    @property
    def keeps_in_grad(self) -> bool:
        """True if the next micro-batch stays in `.grad`, where the optimizer finds it."""
        return self.tensors.is_parameters and self.next_is_all

    def expects_sum(self, parameter: Tensor) -> bool:
        """Tell whether the next backward pass adds to an existing sum of this parameter."""
        settings = self.settings
        if self.policy.apart or settings.needs_closure:
            return False
        if settings.accumulate_in_backward and parameter.dtype in HALF_DTYPES:
            return True  # the float32 sum is created when it is asked for
        if not self.state.through_backward:  # nor will the next micro-batch come through it
            return False
        parameters = self.tensors.parameters()
        index = next((i for i, p in enumerate(parameters) if p is parameter), None)
        if index is None or self.state.in_grad:
            return index is not None and parameter.grad is not None
        return self.state.window.of(parameters).sums[index] is not None

    # Warnings

    def nothing_to_clip(self) -> None:
        """Warn that `clip_grad_norm_` has found no gradient."""
        if self.state.micro_batches:
            self.warn_once(
                "clip",
                "clip_grad_norm_ found no gradient to clip, because it lies in the window. Leave "
                "the call out, and pass max_norm to the optimizer",
            )

    def warn_of_loss(self) -> None:
        """Warn, at the end of the optimizer or the program, of gradients that no step has used."""
        state = self.state
        holds = state.in_grad or not all(map(is_none, state.window.sums))
        if holds and state.micro_batches > state.saved and not hasattr(sys, "last_type"):
            self.update(saved=state.micro_batches)
            text = (
                f"{OP}: it ended with micro-batches in its window that no step has used, "
                f"{state.micro_batches}. Call opt.flush() after the last batch, or opt.discard()"
            )
            warnings.warn(text, stacklevel=2)

    def warn_once(self, topic: str, text: str) -> None:
        """Warn, with the user's line, unless this topic was warned of before."""
        if topic not in self.warned:
            self.warned.add(topic)
            warnings.warn(f"{OP}: {text}", stacklevel=users_level())


_DROPPED = "the open window was dropped"


def explain(error: BaseException, op: str, why: str) -> None:
    """Add a note to an exception that the window was dropped, and why, unless it has one."""
    if any(_DROPPED in said for said in getattr(error, "__notes__", ())):
        return
    note = f"{op}: {_DROPPED}: {why}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif isinstance(error, Exception):  # Python 3.10 has no notes; Ctrl-C is raised unchanged
        raise RuntimeError(note) from error
