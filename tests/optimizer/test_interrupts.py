"""An exception at any line of AccumulatingOptimizer leaves things as before a call, or as after it.

A step that failed may leave another rounding of its gradient. A backward pass that failed leaves
`.grad` empty, and drops the window where it could have added to it.

Every line that a call runs is found by a first, clean run; then the call runs once for each of
them, with the exception raised there.
"""

import contextlib
import copy
import gc
import linecache
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import accumext
from accumext.ops import reference
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

PACKAGE = str(Path(accumext.__file__).parent)
OPERATORS = str(reference.__file__)  # in place of kernels, which nothing interrupts

pytestmark = pytest.mark.filterwarnings("ignore:AccumulatingOptimizer")

# After torch's fused kernels, which count no versions, a hook of ours is the first to know that the
# parameters have moved; before its own first line nothing does. Attributes that GradScaler sets
# before it calls `step` go once that has begun.
UNKNOWABLE = {"_end", "step", "__setattr__"}
BEFORE_STEP = "enabled = torch.is_grad_enabled()"  # the line before the `try:` of a step


# Interrupted calls


@dataclass
class Case:
    """The parameters and everything around them."""

    parameters: list[Tensor]
    opt: AccumulatingOptimizer
    scaler: torch.amp.GradScaler | None = None
    packed: dict[str, Any] | None = None
    late: Tensor | None = None  # a parameter that is added

    def loss(self, value: float) -> Tensor:
        """Gradients that are no multiples of each other from call to call."""
        total = torch.zeros((), dtype=torch.float64)
        for i, p in enumerate(self.parameters):
            if p.dim() == 2:
                rows = torch.tensor([0, 2, 2])
                total = total + nn.functional.embedding(rows, p, sparse=True).sum() * value
            else:
                total = total + (p.double() * (value + i)).sum() + p.double().square().sum() * 0.25
        return total

    def backward(self, value: float, weight: float = 1.0) -> None:
        self.opt.backward(self.loss(value), weight)

    def plain_backward(self, value: float = 5.0) -> None:
        """The user's own."""
        loss = self.loss(value)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()


def optimizer(kind: str, **options: Any) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda ps: getattr(torch.optim, kind)(ps, lr=0.5, **options)


MOMENTUM = optimizer("SGD", momentum=0.5, foreach=True)


def case(
    make=MOMENTUM,
    dtype=torch.float64,
    scaler=None,
    outer=False,
    embedding=False,
    masters=False,  # whether it steps on masters; "stochastic" rounds them so
    **named: Any,
) -> Case:
    parameters = [nn.Parameter(torch.full((3,), 2.0**i, dtype=dtype)) for i in range(2)]
    if embedding:
        parameters.append(nn.Parameter(torch.ones(4, 2, dtype=dtype)))
    if scaler or outer:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        scaler.scale(torch.zeros(()))
    stepped_on = parameters
    if masters:
        stepped_on = accumext.masters(parameters, stochastic_rounding=masters == "stochastic")
        named["masters"] = stepped_on
    opt = AccumulatingOptimizer(make(stepped_on), scaler=None if outer else scaler, **named)
    return Case(parameters, opt, scaler)


FUSED = {"make": optimizer("Adam", fused=True)}
HALF = {"dtype": torch.bfloat16}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.5},
    "own-scaler": {"scaler": True},
    "own-scaler-clipped-fused": {"scaler": True, "max_norm": 0.5, **FUSED},
    "fused": {"make": optimizer("SGD", fused=True)},
    "half": HALF,
    "half-fused-scaler": {**HALF, **FUSED, "scaler": True},
    "sparse": {"embedding": True, "make": optimizer("SGD"), "max_norm": 0.5},
    "skip-micro-batch": {"on_nonfinite": "skip_micro_batch", "scaler": True},
    "raise": {"on_nonfinite": "raise", "max_norm": 0.5},
    "in-backward": {"accumulate_in_backward": True},
    "masters": {**HALF, "masters": True, "max_norm": 0.5},
    "masters-fused-scaler": {**HALF, **FUSED, "masters": "stochastic", "scaler": True},
    "scaler-around": {"outer": True},
    "scaler-around-fused": {"outer": True, **FUSED},
}
NIGHTLY = settings.get_current_profile_name() == "nightly"


def almost_full(c: Case, micro_batch: Callable[[Case], object]) -> None:
    for _ in range(c.opt.window - 1):
        micro_batch(c)


def one(c: Case) -> None:
    c.backward(1.0, 3.0)


def one_and_pending(c: Case) -> None:
    one(c)
    c.plain_backward()


def used_up(c: Case) -> None:
    """At window=1 what the step used still lies in `.grad`."""
    c.backward(7.0)
    c.opt.step()


def full(c: Case) -> None:
    almost_full(c, one)
    c.backward(2.0, 0.5)


def almost_full_and_pending(c: Case) -> None:
    almost_full(c, one)
    c.plain_backward()


def full_of_plain_passes(c: Case) -> None:
    almost_full(c, lambda c: (c.plain_backward(), c.opt.step()))
    c.plain_backward()


def almost_full_by_scaler(c: Case) -> None:
    almost_full(c, lambda c: (c.plain_backward(), c.scaler.step(c.opt), c.scaler.update()))
    c.plain_backward()


def packed(c: Case) -> None:
    one_and_pending(c)
    c.packed = c.opt.accumulation_state_dict()
    c.backward(9.0)


def micro_batch(c: Case) -> None:
    with c.opt.micro_batch():
        c.backward(3.0, 2.0)
        c.backward(4.0, 2.0)


CALLS: dict[str, Callable[[Case], object]] = {
    "backward": lambda c: c.backward(3.0, 2.0),
    "accumulate": lambda c: c.opt.accumulate(2.0),
    "step": lambda c: c.opt.step(),
    "step with a closure": lambda c: c.opt.step(lambda: 1.0),
    "flush": lambda c: c.opt.flush(),
    "discard": lambda c: c.opt.discard(),
    "zero_grad": lambda c: c.opt.zero_grad(),
    "zero_grad in place": lambda c: c.opt.zero_grad(set_to_none=False),
    "micro_batch": micro_batch,
    "load": lambda c: c.opt.load_accumulation_state_dict(c.packed),
    "plain backward": Case.plain_backward,  # torch's alone
    "scaler.step": lambda c: c.scaler.step(c.opt),
}


def nothing(c: Case) -> None:
    pass


pending = Case.plain_backward
TAKEN_IN = (almost_full_and_pending, full_of_plain_passes)  # by a step, which is then a long one
BEFORE = {  # by what is interrupted, what is done before
    "backward": [nothing, one, pending, used_up],
    "accumulate": [pending, one_and_pending],
    "step": [full, *TAKEN_IN, used_up, nothing],
    "step with a closure": [full, pending],
    "flush": [one, one_and_pending, pending],
    "discard": [one_and_pending],
    "zero_grad": [one_and_pending, one],
    "zero_grad in place": [one],
    "micro_batch": [nothing, one_and_pending, used_up],
    "load": [packed],
    "plain backward": [one],
    "scaler.step": [pending, almost_full_by_scaler],
}


def runs(variant: str, call: str) -> bool:
    """All run at night."""
    varies = call == "accumulate" and variant in ("half", "skip-micro-batch")
    return variant == "plain" or varies or NIGHTLY


def marks(variant: str, call: str, before: Callable[[Case], None], window: int) -> Any:
    """Few run by default, more in CI."""
    short = call not in ("flush", "micro_batch", "step with a closure")
    takes_in = call == "step" and before in TAKEN_IN
    first = before in BEFORE[call][:2]
    quick = variant == "plain" and window == 2 and short and not takes_in and first
    return () if quick else pytest.mark.full


CASES = [
    pytest.param(v, b, c, w, id=f"{v}-{b.__name__}-{c}-{w}", marks=marks(v, c, b, w))
    for w in (1, 2)
    for v, variant in VARIANTS.items()
    for c, befores in BEFORE.items()
    for b in befores
    if (c == "scaler.step") == variant.get("outer", False) and runs(v, c)
]


# The comparison


def plain(*values: Any) -> list[Any]:
    """Nested values as one list of numbers and names."""
    leaves: list[Any] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            dense = leaf.detach().to_dense() if leaf.is_sparse else leaf.detach()
            leaves += [str(leaf.dtype), *dense.double().flatten().tolist()]
        else:
            leaves.append(leaf)
    return leaves


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Tell whether two records are equal up to a rounding."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(a, dict):
        return all(same(a[k], b[k], tolerance) for k in a)
    return bool(a == b)


def seen(c: Case) -> dict[str, list[Any]]:
    """Everything that an interrupted call may not leave in the middle.

    The gradients in `.grad` show in the later results; those that are used up may go at any time.
    """
    packed = c.opt.accumulation_state_dict()
    optimizers = vars(c.opt) | vars(c.opt.optimizer)
    return {
        "parameters": plain(c.parameters),
        "window": plain([c.opt.main_grad(p) for p in c.parameters]),
        "weight": plain(packed["micro_batches"], packed["weight"]),
        "state": plain(c.opt.state_dict()),
        "scaler": plain(c.scaler and c.scaler.state_dict()),
        "last": plain(c.opt.stats()),
        "grad mode": [torch.is_grad_enabled()],
        "left": sorted({"grad_scale", "found_inf"} & optimizers.keys()),
    }


def go_on(c: Case) -> Any:
    """Run the rest of this window, another, and a partial one; return the result."""
    torch.set_grad_enabled(True)
    for value in (1.0, 2.0):
        c.backward(value, value)
        c.opt.step()
    c.plain_backward(3.0)
    c.opt.flush()
    return seen(c)


class Stop(BaseException):
    """An interrupt as KeyboardInterrupt is: no `except Exception` catches it."""


class Lines:
    """Counts the lines of the package that run, and raises at one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.places: list[str] = []
        self._open: set[tuple[FrameType, int]] = set()  # `with` blocks

    def __enter__(self) -> "Lines":
        gc.disable()  # what dies of an earlier case must not run, and raise in vain, in this one
        self.before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)
        gc.enable()

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        return self._line if file.startswith(PACKAGE) and file != OPERATORS else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and self._lets_signals_in(frame):
            self.places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            if len(self.places) == self.stop_at:
                raise Stop
        return self._line

    def _lets_signals_in(self, frame: FrameType) -> bool:
        """Not a `try:`, which does nothing, nor the line after a `finally:` or, once more, of a
        `with`, as a block ends: its last call lets them in, and what undoes it."""
        file, number = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(file, number).strip()
        if source.startswith("with "):
            self._open ^= {(frame, number)}
            return (frame, number) in self._open
        ends = linecache.getline(file, number - 1).strip() == "finally:"
        skipped = ends or source in ("try:", BEFORE_STEP)
        return not skipped and frame.f_code.co_name not in UNKNOWABLE


def faults(variant: dict[str, Any], window: int, before: Callable, name: str) -> list[str]:
    """Each line at which an exception leaves something in the middle."""
    call, outcomes = CALLS[name], []

    def prepared() -> Case:
        torch.set_grad_enabled(True)
        c = case(window=window, **variant)
        before(c)
        return c

    def allow(*actions: Callable[[Case], object]) -> None:
        c = prepared()
        for action in actions:
            action(c)
        outcomes.append((seen(c), go_on(c)))

    def stopped_step(c: Case) -> None:
        hook = c.opt.optimizer.register_step_pre_hook(stop)
        with contextlib.suppress(Stop):
            call(c)
        hook.remove()

    def taken(c: Case) -> None:
        c.opt.window += 1
        (CALLS["step"] if name == "flush" else call)(c)
        c.opt.window -= 1

    allow()
    c = prepared()
    with contextlib.suppress(RuntimeError), Lines() as clean:  # nothing to accumulate is an error
        call(c)
    outcomes.append((seen(c), go_on(c)))
    if name in ("backward", "micro_batch"):  # `.grad` is empty, and the window may be dropped
        allow(CALLS["zero_grad"])
        if "on_nonfinite" not in variant:
            allow(CALLS["zero_grad"], CALLS["discard"])
    if name in ("step", "step with a closure", "scaler.step", "flush"):  # or with what it took in
        allow(stopped_step)
        allow(taken)
    tolerance = 2.0**-6 if variant.get("dtype") == torch.bfloat16 else 1e-12
    found = []
    for at, place in enumerate(clean.places, 1):
        c = prepared()
        # Not every line lets an exception out: what runs as an object dies does not.
        with contextlib.suppress(Stop, RuntimeError), Lines(at):
            call(c)
        now = seen(c)
        fits = [o for o in outcomes if same(o[0], now, tolerance)]
        later = go_on(c) if fits else None
        if not any(same(o[1], later, tolerance) for o in fits):
            got, allowed = (later, fits[0][1]) if fits else (now, outcomes[0][0])
            wrong = [k for k in got if not same(got[k], allowed[k], tolerance)]
            found.append(f"{place}: {'going on ' * bool(fits)}differs in {wrong}")
        torch.set_grad_enabled(True)
        c.opt.discard()
    return found


def stop(*_: object) -> None:
    raise Stop


@pytest.mark.parametrize(("variant", "before", "name", "window"), CASES)
def test_an_exception_at_any_line(variant, before, name, window):
    found = faults(VARIANTS[variant], window, before, name)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", ["backward", "accumulate"])
def test_an_exception_at_any_line_beside_another_wrapper(name, window):
    """The pass of one reaches a parameter of the other, which holds a gradient of its own, or takes
    what the pass made of it."""

    def interrupted(stop_at: int | None = None) -> tuple[list[str], float]:
        torch.set_grad_enabled(True)
        parameters = [nn.Parameter(torch.zeros(())) for _ in range(2)]
        opts = [AccumulatingOptimizer(MOMENTUM([p]), window=window) for p in parameters]
        if name == "backward":
            opts[1].backward(parameters[1] * 3.0)
        else:
            opts[0].backward(parameters[1] * 5.0)
        with contextlib.suppress(Stop), Lines(stop_at) as lines:
            if name == "backward":
                opts[0].backward(parameters[0] + parameters[1] * 7.0)
            else:
                opts[1].accumulate()
        if opts[1].main_grad(parameters[1]) is None:  # not taken yet
            opts[1].accumulate()
        opts[1].flush()
        opts[0].discard()
        return lines.places, parameters[1].item()

    places, expected = interrupted()
    left = {place: interrupted(at)[1] for at, place in enumerate(places, 1)}
    assert not {place: value for place, value in left.items() if value != expected}


@pytest.mark.parametrize("variant", ["scaler-around", "scaler-around-fused"])
def test_a_step_that_does_not_begin_leaves_no_scale_to_the_next(variant):
    """GradScaler multiplies what it finds on an optimizer into the scale of its step."""

    def stepped(interrupted: bool) -> list[Any]:
        c = case(**VARIANTS[variant])
        c.plain_backward()
        if interrupted:
            c.opt.step = stop
            with pytest.raises(Stop):
                c.scaler.step(c.opt)
            del c.opt.step
        c.scaler.step(c.opt)
        return [plain(c.parameters), c.opt.stats()]

    assert stepped(True) == stepped(False)


def loaded(c: Case) -> dict[str, Any]:
    """The state after a window, of parameters that are others by now."""
    full(c)
    c.opt.step()
    state = copy.deepcopy(c.opt.state_dict())
    almost_full_and_pending(c)
    c.opt.step()
    return state


def add_group(c: Case, state: dict[str, Any]) -> None:
    (late,) = accumext.masters([c.late])
    c.opt.add_param_group({"params": [late]})


OF_MASTERS: dict[str, Callable[[Case, dict[str, Any]], object]] = {
    "add_param_group": add_group,
    "load_state_dict": lambda c, state: c.opt.load_state_dict(state),
    "load_state_dict without masters": lambda c, state: c.opt.load_state_dict(
        {k: v for k, v in state.items() if k != "masters"}
    ),
    "a method of the optimizer": lambda c, state: c.opt.swap(),
}


class Swapping(torch.optim.SGD):
    """Writes its parameters between steps, as schedule-free optimizers do."""

    @torch.no_grad()
    def swap(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)


@pytest.mark.parametrize("name", OF_MASTERS)
def test_an_exception_at_any_line_of_what_writes_masters(name):
    def gone_on(calls: bool, stop_at: int | None = None) -> tuple[list[str], list[Any]]:
        c = case(lambda ps: Swapping(ps, 0.5, momentum=0.5), torch.bfloat16, masters=True, window=2)
        c.late = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        c.parameters.append(c.late)
        state = loaded(c)
        with contextlib.suppress(Stop), Lines(stop_at) as lines:
            if calls:
                OF_MASTERS[name](c, state)
        first = plain(c.parameters, c.opt.state_dict())
        for value in (1.0, 2.0, 3.0, 4.0):
            c.backward(value)
            c.opt.step()
        return lines.places, [first, *plain(c.parameters, c.opt.state_dict())]

    (_, before), (places, after) = gone_on(False), gone_on(True)
    assert before != after
    left = {f"{at}: {place}": gone_on(True, at)[1] for at, place in enumerate(places, 1)}
    assert not [place for place, seen in left.items() if seen not in (before, after)]


@pytest.mark.usefixtures("alone")
def test_an_exception_at_any_line_of_discard_where_fsdp_holds_the_window():
    def gone_on(discards: bool, stop_at: int | None = None) -> tuple[list[str], list[Any]]:
        model = fully_shard(nn.Linear(2, 1, bias=False))
        nn.init.ones_(model.weight)
        opt = AccumulatingOptimizer(
            MOMENTUM(list(model.parameters())), window=2, synchronize="window"
        )

        def add(value: float) -> None:
            with opt.micro_batch(model):
                opt.backward(model(torch.full((2,), value)).sum())
            opt.step()

        add(1.0)
        with contextlib.suppress(Stop), Lines(stop_at) as lines:
            if discards:
                opt.discard()
        for value in (2.0, 4.0, 8.0, 16.0):
            add(value)
        opt.discard()
        (shard,) = opt.param_groups[0]["params"]
        return lines.places, [model.weight is shard, *plain(shard.to_local())]

    (_, before), (places, after) = gone_on(False), gone_on(True)
    left = {place: gone_on(True, at)[1] for at, place in enumerate(places, 1)}
    assert not {place: seen for place, seen in left.items() if seen not in (before, after)}
