"""The engine of one optimizer: its parts, and the only place where its state is replaced."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Sequence
from threading import get_ident
from typing import Any, cast
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from accumext.master_weights import Target
from accumext.ops.wgrad_fusion import MainGrads
from accumext.optimizer._grads import clear, is_none, note_gone
from accumext.optimizer._policy import policy_of
from accumext.optimizer._reducer import Reducer, reducer_of
from accumext.optimizer._report import Name
from accumext.optimizer._settings import OP, Settings
from accumext.optimizer._window import NO_WINDOW, Phase, State, Window
from accumext.tensors.checks import message, users_level
from accumext.tensors.kinds import HALF_DTYPES, Group

ALIVE: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # by id

# Those whose `backward` has left gradients in `.grad`, where others that hold the parameters look.
LEAVING: WeakValueDictionary[int, Engine] = WeakValueDictionary()


def engines_alive(among: WeakValueDictionary[int, Engine] = ALIVE) -> list[Engine]:
    """Return those of all optimizers, also while other threads make some."""
    return [engine for reference in among.valuerefs() if (engine := reference()) is not None]


def others_of(engine: Engine) -> list[Engine]:
    """Return those of other optimizers that have taken gradients of the same parameters."""
    mine = set(map(id, engine.target.parameters()))
    return [
        other
        for other in engines_alive()
        if other is not engine
        and (other.state.micro_batches or other.state.last)
        and not mine.isdisjoint(map(id, other.target.parameters()))
    ]


@atexit.register
def _warn_at_exit() -> None:
    for engine in engines_alive():
        engine.warn_of_loss()


# What cannot be called in a phase, and the rest of the error's sentence: what is called must be
# what, got what, and what to do.
_ALONE = ("come after step or discard", "one for a window that is summed over processes already")
_SENT = (
    {"backward", "accumulate", "micro_batch", "take", "accumulation_state_dict", "__getstate__"},
    (*_ALONE, "With reduce_in_backward=True a micro-batch has one backward pass"),
)
_REFUSED: dict[Phase, tuple[set[str], tuple[str, ...]]] = {
    Phase.INSIDE: (
        {"accumulate", "micro_batch", "step", "flush", "discard", "load_accumulation_state_dict"},
        ("be outside micro_batch()", "one inside"),
    ),
    Phase.SENDING: _SENT,
    Phase.SUMMED: _SENT,
}


class Engine:
    """What an AccumulatingOptimizer is made of. Never replaced: trainers copy the attributes of an
    optimizer."""

    def __init__(
        self, optimizer: Optimizer, settings: Settings, target: Target, watch: Any
    ) -> None:
        self.optimizer = optimizer  # the wrapped one
        self.target = target  # what it steps on
        self.state = State()
        self.reducer: Reducer = reducer_of(settings.process_group, target.parameters())
        self.settings, self.policy = settings, policy_of(settings.on_nonfinite)
        self.warned = set[str]()  # of what: each once
        self.watch = watch  # the Watch of the first windows, then None
        self.main_grads = MainGrads(self, target.parameters())
        self.thread = get_ident()  # that made it, or used it last
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
            saved=window.ledger.micro_batches,  # the original is there to step on them
        )
        gone = dict.fromkeys(("main_grads", "watch"))
        settings = self.settings._replace(process_group=group)
        return {**vars(self), "settings": settings, "state": state, **gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.settings.process_group is not None:  # that of the process that unpickles
            self.settings = self.settings._replace(process_group=dist.group.WORLD)
        self.share(self.settings.process_group)
        self.main_grads = MainGrads(self, self.target.parameters())
        self.thread, self.leaves = get_ident(), False
        ALIVE[id(self)] = self

    def __del__(self) -> None:
        # At the end of a program this module may be gone before its objects.
        if sys is not None and not sys.is_finalizing() and "state" in vars(self):
            self.warn_of_loss()
            if any(self.state.used.ours):
                note_gone(self.state.used, self.target.parameters())

    # The state

    def update(self, **changes: Any) -> None:
        """Replace parts of the state."""
        self.state = self.state._replace(**changes)

    def commit(self, state: State, emptied: Sequence[Tensor] = (), drops: bool = False) -> None:
        """Replace the state, empty `.grad` of these parameters, and with `drops` what the reducer
        holds; after an exception all of that or nothing."""

        def rest() -> None:
            clear(emptied)
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
        """Start another window. A sum that is on its way ends first, as other ranks expect."""
        state = self.state
        after = state._replace(
            window=successor, micro_batch=None, sending=None, accumulated=False, other_pass=None
        )
        self.commit(after, self.target.parameters() if state.in_grad else (), drops=True)
        if state.sending is not None:
            state.sending.abandon()

    def refuse(self, op: str, method: str | None = None) -> None:
        """Raise for a method that cannot be called in the phase of the window."""
        method = method or op.rpartition(".")[2]
        for phase in self.state.phases():
            methods, sentence = _REFUSED.get(phase, ((), ()))
            if method in methods:
                raise RuntimeError(message(op, "the call", *sentence))

    def window_out_of_grad(self) -> Window:
        """Return the open window as it is without `.grad`."""
        return self.policy.out_of_grad(self.state.window, self.target.parameters())

    def forget_evidence(self) -> None:
        """Gradients change: the last report cannot look into them any more."""
        if self.state.last is not None:
            self.state.last.evidence = None

    # What it is made of

    def configure(self, settings: Settings) -> None:
        """Take other settings."""
        self.settings, self.policy = settings, policy_of(settings.on_nonfinite)
        if settings.process_group is not None:
            self.share(settings.process_group)

    def share(self, group: Group | None) -> None:
        """Sum windows over this group from here on; None: over the one so far."""
        if group is not None and group is not self.reducer.group:
            self.reducer = reducer_of(group, self.target.parameters(), self.reducer)

    def know_parameters(self) -> None:
        """Look at the parameters again: the optimizer has been given more."""
        self.target.know()
        parameters = self.target.parameters()
        self.main_grads.declare(parameters)
        self.reducer = self.reducer.knowing(parameters)

    def names(self) -> dict[Tensor, Name]:
        """Names of parameters and masters, if the optimizer was given any, else indices."""
        names: list[Name] = []
        for group in self.optimizer.param_groups:
            indices = range(len(names), len(names) + len(group["params"]))
            given = group.get("param_names")
            named = isinstance(given, (list, tuple)) and len(given) == len(indices)
            names += cast(list[Name], given) if named else indices
        lists = self.target.parameters(), self.target.stepped_on()
        return {p: name for several in lists for p, name in zip(several, names, strict=True)}

    @property
    def group(self) -> Group | None:
        """The processes to sum the window over; None for this one alone."""
        return self.reducer.group

    @property
    def keeps_at_once(self) -> bool:
        """True if the next micro-batch is all that the window will hold."""
        return self.settings.window == 1 and not self.state.micro_batches and self.group is None

    @property
    def keeps_in_grad(self) -> bool:
        """True if the next micro-batch stays in `.grad`, where the optimizer finds it."""
        return self.target.is_parameters and self.keeps_at_once

    def expects_sum(self, parameter: Tensor) -> bool:
        """Tell whether the next backward pass adds to a sum of this parameter that is there."""
        settings = self.settings
        if self.policy.apart or settings.needs_closure:
            return False
        if settings.accumulate_in_backward and parameter.dtype in HALF_DTYPES:
            return True  # it is made in float32
        if not self.state.through_backward:  # nor will the next: it would be formed for nothing
            return False
        parameters = self.target.parameters()
        index = next((i for i, p in enumerate(parameters) if p is parameter), None)
        if index is None or self.state.in_grad:
            return index is not None and parameter.grad is not None
        return self.state.window.of(parameters).sums[index] is not None

    # Warnings

    def nothing_to_clip(self) -> None:
        """Warn: `clip_grad_norm_` has found no gradient."""
        if self.state.micro_batches:
            self.warn_once(
                "clip",
                "clip_grad_norm_ found no gradient to clip, because it lies in the window. Leave "
                "the call out, and pass max_norm to the optimizer",
            )

    def warn_of_loss(self) -> None:
        """Warn at the end of the optimizer or the program of gradients that no step has used."""
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
        """Warn, the first time, of the user's line."""
        if topic not in self.warned:
            self.warned.add(topic)
            warnings.warn(f"{OP}: {text}", stacklevel=users_level())
