"""The state of one optimizer: an open window, what a step has used, and the box they lie in."""

from __future__ import annotations

import atexit
import math
import sys
import warnings
from collections.abc import Sequence
from operator import is_
from threading import get_ident
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from accumext.distributed import ShardedWindow
from accumext.master_weights import Target
from accumext.ops.wgrad_fusion import MainGrads
from accumext.optimizer._grads import Used, clear, grads_of, is_none, note_gone
from accumext.optimizer._report import Name, WindowReport
from accumext.optimizer._settings import OP, Settings
from accumext.tensors.checks import fail_type, fail_value, message, type_name, users_level
from accumext.tensors.kinds import HALF_DTYPES, Group, any_half, main_dtype, nonfinite
from accumext.tensors.scalars import Scalar, as_tensor, to_host_if_free


class Window(NamedTuple):
    """`sums[i] = scale / unit * sum(weight_k * grad_k[i])` over micro-batches k. Never changed, but
    replaced; only the values of the sums are written.

    While `in_grad`, the sums are what lies in `.grad`, whoever writes there, in a window of one;
    `sums` tells what the wrapper's own backward pass has made of it.
    """

    parameters: Sequence[Tensor] = ()
    mixed: bool = False  # whether any is of half precision, so that its sum is float32
    sums: Sequence[Tensor | None] = ()  # None: no gradient yet
    in_grad: bool = False
    unchecked: bool = False  # in `.grad`, and to be dropped if it is not finite
    micro_batches: int = 0
    weight: Scalar = 0.0  # sum(weight_k)
    unit: Scalar | None = None  # None while every weight was the number zero
    scale: Scalar = 1.0
    loss_scale: Scalar = 1.0  # of the latest micro-batch
    found_inf: Scalar = 0.0  # 1.0: somebody else found an inf or NaN in what came in
    norm: Tensor | None = None  # 2-norm of the sums, if the last pass over all of them found it
    finite: Scalar | None = None  # micro-batches that were, where the others are left out
    dropped: tuple[Tensor, ...] = ()  # parameters that had a gradient left out, if known here
    world: Scalar | None = None  # micro-batches of all processes, once they are summed
    agreed: bool = False  # the weight is that of all shards
    held_back: bool = False  # gradients of a model that did not synchronise them

    def of(self, parameters: Sequence[Tensor]) -> Window:
        """With the sums in the order of these: the optimizer's parameters may have changed."""
        before = self.parameters
        if self.in_grad or (len(before) == len(parameters) and all(map(is_, before, parameters))):
            return self
        known = {id(p): main for p, main in zip(before, self.sums, strict=True)}
        sums = [known.get(id(p)) for p in parameters]
        mixed = any_half(parameters)
        return self._replace(parameters=parameters, mixed=mixed, sums=sums, norm=None)

    def out_of_grad(self, parameters: Sequence[Tensor]) -> Window:
        """As it is without `.grad`: its sums are the gradients that lie there."""
        if not self.in_grad:
            return self.of(parameters)
        grads = grads_of(parameters)
        if self.unchecked and nonfinite([g for g in grads if g is not None]):
            left = Window(finite=0.0, found_inf=1.0, micro_batches=self.micro_batches)
            return left._replace(loss_scale=self.loss_scale, held_back=self.held_back)
        pairs = zip(parameters, grads, strict=True)
        sums = [None if g is None else g.detach().to(main_dtype(p)) for p, g in pairs]
        kept = 1.0 if self.unchecked else None
        out = self._replace(in_grad=False, unchecked=False, sums=(), finite=kept)
        return out.of(parameters)._replace(sums=sums)


NO_WINDOW = Window()


class OpenMicroBatch(NamedTuple):
    """The micro-batch between entry and exit of `micro_batch()`."""

    weight: Scalar | None = None  # of all backward calls, once there was one
    ratio: Scalar = 1.0  # weight / unit
    part: Window | None = None  # its gradients, where they are looked at before they are added
    failed: bool = False  # a backward pass did not come to its end
    base: int = 0  # micro-batches that the window held before it
    key: object = None  # the same for all parts of one micro-batch


class OtherPass(NamedTuple):
    """The gradients of this optimizer's parameters that a backward pass of another wrapper made.

    They are kept out of `.grad`, since this one would take them for its own: `accumulate` takes
    them, and whatever else brings it a gradient goes on without them.
    """

    parameters: Sequence[Tensor]
    grads: Sequence[Tensor | None]  # of the loss times `factor`
    weight: Scalar  # of the loss
    factor: Scalar  # of the loss: its loss scale, and its weight as far as that was carried
    loss_scale: Scalar
    group: Group | None  # over which the other one sums its window: these are not synchronised
    key: object  # of the micro-batch that the pass is a part of; None if it is all of one
    several: bool  # it followed another one, which was not taken either
    partly: bool  # the other one holds more of these parameters, and took their gradients


class State(NamedTuple):
    """Everything that changes, replaced by one assignment."""

    window: Window = NO_WINDOW
    used: Used = Used()  # what a step has used and left in `.grad`
    micro_batch: OpenMicroBatch | None = None  # inside micro_batch()
    model_group: Group | None = None  # of the model given to micro_batch()
    all_reduce: Any = None  # the WindowAllReduce that has begun to sum the window
    last: WindowReport | None = None
    stepped: bool = False
    accumulated: bool = False  # since the last step: too late for an outer GradScaler
    through_backward: bool = False  # the latest micro-batch came through `backward`
    saved: int = 0  # micro-batches of the window that are in a checkpoint, or another's
    other_pass: OtherPass | None = None  # that this optimizer has not taken
    earlier_scale: tuple[Used, Scalar] | None = None  # of what lies in `.grad`, see `note_scale`


ALIVE: WeakValueDictionary[int, Box] = WeakValueDictionary()  # by id


# Those whose `backward` has left gradients in `.grad`, where others that hold the parameters look.
LEAVING: WeakValueDictionary[int, Box] = WeakValueDictionary()


def boxes_alive(among: WeakValueDictionary[int, Box] = ALIVE) -> list[Box]:
    """Those of all optimizers, also while other threads make some."""
    return [box for reference in among.valuerefs() if (box := reference()) is not None]


def others_of(box: Box) -> list[Box]:
    """Those of other optimizers that have taken gradients of the same parameters."""
    mine = set(map(id, box.target.parameters()))
    return [
        other
        for other in boxes_alive()
        if other is not box
        and (other.state.window.micro_batches or other.state.last)
        and not mine.isdisjoint(map(id, other.target.parameters()))
    ]


@atexit.register
def _warn_at_exit() -> None:
    for box in boxes_alive():
        box.warn_of_loss()


class Box:
    """The state of one optimizer. Never replaced: trainers copy the attributes of an optimizer."""

    def __init__(
        self, optimizer: Optimizer, settings: Settings, target: Target, watch: Any
    ) -> None:
        self.optimizer = optimizer  # the wrapped one
        self.settings = settings
        self.target = target  # what it steps on
        self.state = State()
        self.warned = set[str]()  # of what: each once
        self.watch = watch  # the Watch of the first windows, then None
        self.sharded = ShardedWindow.of(target.parameters())
        self.main_grads = MainGrads(self, target.parameters())
        # Settings that all processes are known to have, and what they were compared by.
        self.agreed: tuple[Settings, Tensor] | None = None
        self.thread = get_ident()  # that made it, or used it last
        self.leaves = False  # whether it is one of LEAVING
        ALIVE[id(self)] = self

    def __getstate__(self) -> dict[str, Any]:
        self.refuse_while_reducing(f"{OP}.__getstate__")
        if self.sharded is not None:
            self.sharded.refuse_while_held(f"{OP}.__getstate__")
        group: Any = self.settings.process_group
        if group is not None and group is not dist.group.WORLD:
            contract = "be the default group to be copied or pickled"
            raise RuntimeError(message(OP, "process_group", contract, "another"))
        group = None if group is None else "default"
        settings = self.settings._replace(process_group=group)
        window = self.state.window.out_of_grad(self.target.parameters())
        state = State(  # copies come without `.grad`, and share no model's group
            window=window,
            last=self.state.last,
            stepped=self.state.stepped,
            accumulated=self.state.accumulated,
            saved=window.micro_batches,  # the original is there to step on them
        )
        gone = dict.fromkeys(("main_grads", "agreed", "watch"))
        return {**vars(self), "settings": settings, "state": state, **gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.settings.process_group is not None:  # that of the process that unpickles
            self.settings = self.settings._replace(process_group=dist.group.WORLD)
        self.main_grads = MainGrads(self, self.target.parameters())
        self.thread, self.leaves = get_ident(), False
        ALIVE[id(self)] = self

    def warn_of_loss(self) -> None:
        """At the end of the optimizer or of the program: gradients that no step has used."""
        window, lost = self.state.window, self.state.window.micro_batches
        holds = window.in_grad or not all(map(is_none, window.sums))
        if holds and lost > self.state.saved and not hasattr(sys, "last_type"):
            self.state = self.state._replace(saved=lost)
            text = (
                f"{OP}: it ended with micro-batches in its window that no step has used, {lost}. "
                "Call opt.flush() after the last batch, or opt.discard()"
            )
            warnings.warn(text, stacklevel=2)

    def __del__(self) -> None:
        # At the end of a program this module may be gone before its objects.
        if sys is not None and not sys.is_finalizing() and "state" in vars(self):
            self.warn_of_loss()
            if any(self.state.used.ours):
                note_gone(self.state.used, self.target.parameters())

    def expects_sum(self, parameter: Tensor) -> bool:
        """Tell whether the next backward pass adds to a sum of this parameter that is there."""
        window, settings = self.state.window, self.settings
        if settings.looks_first or settings.needs_closure:
            return False
        if settings.accumulate_in_backward and parameter.dtype in HALF_DTYPES:
            return True  # it is made in float32
        if not self.state.through_backward:  # nor will the next: it would be formed for nothing
            return False
        parameters = self.target.parameters()
        index = next((i for i, p in enumerate(parameters) if p is parameter), None)
        if index is None or window.in_grad:
            return index is not None and parameter.grad is not None
        return window.of(parameters).sums[index] is not None

    def know_parameters(self) -> None:
        """Look at the parameters again: the optimizer has been given more."""
        self.target.know()
        self.agreed = None
        parameters = self.target.parameters()
        self.main_grads.declare(parameters)
        if self.sharded is None:
            self.sharded = ShardedWindow.of(parameters)

    def names(self) -> dict[Tensor, Name]:
        """Names of parameters and masters where the optimizer was given any, else indices."""
        names: list[Name] = []
        for group in self.optimizer.param_groups:
            indices = range(len(names), len(names) + len(group["params"]))
            given = group.get("param_names")
            named = isinstance(given, (list, tuple)) and len(given) == len(indices)
            names += cast(list[Name], given) if named else indices
        target = self.target
        lists = target.parameters(), target.stepped_on()
        return {p: name for several in lists for p, name in zip(several, names, strict=True)}

    @property
    def group(self) -> Group | None:
        """The processes to sum the window over; None for this one alone."""
        group = self.settings.process_group or self.state.model_group
        return None if group is None or group.size() == 1 else group

    @property
    def keeps_at_once(self) -> bool:
        """True if the next micro-batch is all that the window will hold."""
        one = self.settings.window == 1 and self.state.window.micro_batches == 0
        return one and self.group is None

    @property
    def keeps_in_grad(self) -> bool:
        """True if the next micro-batch stays in `.grad`, where the optimizer finds it."""
        return self.target.is_parameters and self.keeps_at_once

    def commit(
        self, state: State, emptied: Sequence[Tensor] = (), dropped: ShardedWindow | None = None
    ) -> None:
        """Replace the state, empty `.grad` of these parameters and have FSDP drop what it holds;
        after an exception all of that or nothing."""

        def rest() -> None:
            clear(emptied)
            if dropped is not None:
                dropped.drop()

        try:
            self.state = state
            rest()
        except BaseException:
            if self.state is state:
                rest()
            raise

    def drop(self, successor: Window = NO_WINDOW) -> None:
        """Start another window. An all-reduce of the old one ends first, as other ranks expect."""
        state = self.state
        after = state._replace(
            window=successor, micro_batch=None, all_reduce=None, accumulated=False, other_pass=None
        )
        emptied = self.target.parameters() if state.window.in_grad else ()
        self.commit(after, emptied, self.sharded)
        if state.all_reduce is not None:
            state.all_reduce.abandon(state.window)

    # Errors and warnings

    def refuse_inside_micro_batch(self, op: str) -> None:
        """Raise for what does not go inside `micro_batch()`."""
        if self.state.micro_batch is not None:
            raise RuntimeError(message(op, "the call", "be outside micro_batch()", "one inside"))

    def refuse_while_reducing(self, op: str) -> None:
        """Raise for what cannot enter a window that is summed over processes already."""
        if self.state.all_reduce is not None or self.state.window.world is not None:
            contract = "come after step or discard"
            got = "one for a window that is summed over processes already"
            advice = "With reduce_in_backward=True a micro-batch has one backward pass"
            raise RuntimeError(message(op, "the call", contract, got, advice))

    def refuse_backward(self, op: str) -> None:
        """Raise where no gradients may come from outside: they come in a closure, or too late."""
        self.refuse_while_reducing(op)
        if self.settings.needs_closure:
            kind = type(self.optimizer).__name__
            advice = "Call loss.backward() in the closure, and opt.step(closure)"
            contract = "step without a closure"
            raise RuntimeError(message(op, "the optimizer", contract, kind, advice))

    def nothing_to_clip(self) -> None:
        """`clip_grad_norm_` has found no gradient."""
        if self.state.window.micro_batches:
            self.warn_once(
                "clip",
                "clip_grad_norm_ found no gradient to clip, because it lies in the window. Leave "
                "the call out, and pass max_norm to the optimizer",
            )

    def warn_once(self, topic: str, text: str) -> None:
        """A warning that points at the user's line, the first time."""
        if topic not in self.warned:
            self.warned.add(topic)
            warnings.warn(f"{OP}: {text}", stacklevel=users_level())


_DROPPED = "the open window was dropped"


def explain(error: BaseException, note: str) -> None:
    """Say on an exception's way out, once, what has become of the window."""
    if any(_DROPPED in said for said in getattr(error, "__notes__", ())):
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif isinstance(error, Exception):  # Python 3.10; Ctrl-C stays what it is
        raise RuntimeError(note) from error


# A window in a checkpoint. Names of its numbers there, and of the fields of a window.
_SCALARS = {
    "weight": "weight",
    "unit_weight": "unit",
    "unit_scale": "scale",
    "loss_scale": "loss_scale",
    "norm": "norm",
    "found_inf": "found_inf",
    "survivors": "finite",
}
_KEYS = {"main_grads", "micro_batches", "held_back", *_SCALARS}
_NEVER_NONE = ("weight", "unit_scale", "loss_scale")
_TENSORS = ("norm", "found_inf", "survivors")  # or None


def pack(window: Window) -> dict[str, Any]:
    """Copies of everything that a window out of `.grad` holds, sums by parameter index."""
    values = {name: getattr(window, field) for name, field in _SCALARS.items()}
    for name, nothing, dtype in (
        ("found_inf", 0.0, torch.float32),
        ("survivors", None, torch.float64),
    ):
        there = isinstance(values[name], Tensor) or values[name] != nothing
        values[name] = as_tensor(values[name], dtype) if there else None
    sums = {i: main for i, main in enumerate(window.sums) if main is not None}
    return {
        "main_grads": {i: main.detach().clone() for i, main in sums.items()},
        "micro_batches": window.micro_batches,
        "held_back": window.held_back,
        **{k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in values.items()},
    }


def unpack(op: str, packed: Any, parameters: Sequence[Tensor]) -> Window:
    """The window that `pack` saw, on the devices of the parameters."""
    if not isinstance(packed, dict):
        fail_type(op, "state_dict", "be a dict", type_name(packed))
    if set(packed) != _KEYS:
        advice = "Pass what accumulation_state_dict() returned; state_dict() has no open window"
        keys = sorted(map(str, packed))
        fail_value(op, "state_dict", f"have the keys {sorted(_KEYS)}", keys, advice)
    count, held_back = packed["micro_batches"], packed["held_back"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        fail_value(op, "state_dict['micro_batches']", "be an int of at least 0", repr(count))
    if not isinstance(held_back, bool):
        fail_type(op, "state_dict['held_back']", "be a bool", type_name(held_back))
    sums = _unpacked_sums(op, packed["main_grads"], parameters)
    device = next((main.device for main in sums if main is not None), torch.device("cpu"))
    numbers = {f: _unpacked(op, name, packed[name], device) for name, f in _SCALARS.items()}
    found = numbers["found_inf"]
    numbers["found_inf"] = 0.0 if found is None else to_host_if_free((found != 0).double())
    window = NO_WINDOW.of(parameters)
    return window._replace(sums=sums, micro_batches=count, held_back=held_back, **numbers)


def _unpacked_sums(op: str, sums: Any, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """One for each parameter or None, checked against it."""
    if not isinstance(sums, dict):
        fail_type(op, "state_dict['main_grads']", "be a dict", type_name(sums))
    loaded: list[Tensor | None] = [None] * len(parameters)
    for index, main in sums.items():
        name = f"state_dict['main_grads'][{index!r}]"
        if not isinstance(index, int) or not 0 <= index < len(parameters):
            fail_value(op, name, f"be one of the {len(parameters)} parameters", f"index {index!r}")
        parameter = parameters[index]
        if not isinstance(main, Tensor):
            fail_type(op, name, "be a tensor", type_name(main))
        if main.dtype not in (parameter.dtype, main_dtype(parameter)):
            fail_type(op, name, f"be a {main_dtype(parameter)} tensor", type_name(main))
        if main.shape != parameter.shape:
            fail_value(op, name, f"have shape {list(parameter.shape)}", list(main.shape))
        loaded[index] = main.detach().to(parameter.device, main_dtype(parameter), copy=True)
    return loaded


def _unpacked(op: str, name: str, value: Any, device: torch.device) -> Any:
    """A number as a window holds it: on the device, or read where that is the host."""
    entry, contract = f"state_dict[{name!r}]", "be a number, a 0-dim tensor or None"
    if value is None and name not in _NEVER_NONE:
        return None
    if isinstance(value, Tensor):
        if value.dim() != 0:
            fail_value(op, entry, contract, f"shape {list(value.shape)}")
    elif value is None:
        fail_type(op, entry, "be a number or a 0-dim tensor", "NoneType")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        fail_type(op, entry, contract, type_name(value))
    elif name in _TENSORS:
        fail_type(op, entry, "be a 0-dim tensor or None", "float")
    if name not in ("norm", "found_inf"):  # a sum of weights, a unit, a loss scale
        if not math.isfinite(number := float(value)):
            fail_value(op, entry, "be finite", number)
        if number < 0.0 or (number == 0.0 and name == "unit_weight"):
            bound = "be positive" if name == "unit_weight" else "be at least 0"
            fail_value(op, entry, bound, number)
    if not isinstance(value, Tensor):
        return float(value)
    value = value.detach().to(device, copy=True)
    return value if name in ("norm", "found_inf") else to_host_if_free(value)
