"""AccumulatingOptimizer against its contract as a float64 program, in any order of any actions.

300 examples. `--hypothesis-profile=nightly`: 20,000.
"""

import contextlib
import copy
import math
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.budget import examples
from support.window_oracle import Cell, Oracle, Settings
from torch import Tensor, nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

SHAPES = [(2,), (2,), (1, 2)]
PARAMETERS = range(len(SHAPES))
NAN, INF = float("nan"), float("inf")

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.5, foreach=False),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=0.25, momentum=0.5, weight_decay=0.125),
    "sgd_fused": lambda ps: torch.optim.SGD(ps, lr=0.25, weight_decay=0.5, fused=True),
    # A large eps: a sum that cancels to zero but for rounding must not become a whole step.
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.125, eps=0.125, weight_decay=0.125),
    "adam_fused": lambda ps: torch.optim.Adam(ps, lr=0.125, eps=0.125, fused=True),
}
# float64: both sides form the same sums in another order. Others: the oracle rounds a float64
# gradient once, the wrapper sums in float32 and may round its factors first.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-6}

NEVER_APART = ["skip_window", "step"]  # policies that keep no micro-batch apart

numbers = st.sampled_from([1.0, 2.0, -1.0, -3.0, 4.0, 0.0, 0.5])
hostile = st.sampled_from([INF, -INF, NAN])
pairs = st.tuples(numbers, numbers)
elements = st.tuples(pairs, pairs, pairs)
weights = st.sampled_from([1.0, 1.0, 0.0, 0.5, 2.0, 3.0])
indices = st.sampled_from(list(PARAMETERS))


@st.composite
def coefficients(draw) -> list[tuple[float, float] | None]:
    """The gradient of a loss for each parameter; None where it does not reach it."""
    values = list(draw(elements))
    left_out = draw(st.sampled_from([(), (), (), (2,), (0,), (1, 2), (0, 1)]))
    if draw(st.integers(0, 15)) == 15:
        reached = [i for i in PARAMETERS if i not in left_out]
        values[reached[0]] = (draw(hostile), values[reached[0]][1])
    return [None if i in left_out else values[i] for i in PARAMETERS]


def wide(value: tuple[float, float], index: int) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).reshape(SHAPES[index])


# Lost and skipped windows are warned of; here all of it is meant.
pytestmark = pytest.mark.filterwarnings("ignore:AccumulatingOptimizer")


class Planned(Exception):
    """Out of a hook of the user's."""


def planned(*_: object) -> None:
    raise Planned


class System:
    """The parameters and everything around them, copied as one."""

    def __init__(self, given: Settings) -> None:
        self.parameters = [
            nn.Parameter(torch.full(shape, 2.0**i).to(given.dtype))
            for i, shape in enumerate(SHAPES)
        ]
        self.scaler = None
        if given.scaler is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.opt = AccumulatingOptimizer(
            OPTIMIZERS[given.optimizer](self.parameters),
            window=given.window,
            max_norm=given.max_norm,
            norm_type=given.norm_type,
            reduction=given.reduction,
            on_nonfinite=given.policy,
            scaler=self.scaler if given.scaler == "own" else None,
            accumulate_in_backward=given.in_backward and given.policy in NEVER_APART,
        )

    def loss(self, values: Sequence[tuple[float, float] | None]) -> Tensor:
        terms = [
            (p * wide(v, i).to(p.dtype)).sum()
            for i, (p, v) in enumerate(zip(self.parameters, values))
            if v is not None
        ]
        return torch.stack(terms).sum()


def gradient(values: Sequence[tuple[float, float] | None]) -> list[Tensor | None]:
    return [None if v is None else wide(v, i) for i, v in enumerate(values)]


all_settings = st.builds(
    Settings,
    window=st.sampled_from([1, 1, 2, 3]),
    max_norm=st.sampled_from([None, None, None, 2.0, 1e4]),
    norm_type=st.sampled_from([2.0, INF, 3.0]),
    reduction=st.sampled_from(["mean", "sum"]),
    policy=st.sampled_from([*NEVER_APART, *NEVER_APART, "skip_micro_batch", "raise"]),
    scaler=st.sampled_from([None, None, "own", "outer"]),
    in_backward=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
)


class Machine(RuleBasedStateMachine):
    """Every rule acts on the wrapper and on the oracle, and every invariant compares them."""

    @initialize(given=all_settings)
    def construct(self, given: Settings) -> None:
        self.given = given
        self.system = System(given)
        self.oracle = Oracle(given, self.system.parameters, OPTIMIZERS[given.optimizer])
        self.with_scale()
        self.oracle.scale.value = 4.0 if given.scaler else 1.0
        self.users: list[tuple[Tensor, Cell]] = []  # gradients that the user keeps
        self.parts: list[tuple[Tensor, Cell]] = []  # those that are a part of a larger buffer

    def teardown(self) -> None:
        if hasattr(self, "system"):
            self.opt.discard()

    # Helpers

    @property
    def opt(self) -> AccumulatingOptimizer:
        return self.system.opt

    def counts_for_nothing(self) -> bool:
        """Tell whether `.grad` holds the zeros of a micro-batch of weight 0: nothing to write
        to."""
        in_grad = self.oracle.open.in_grad
        return in_grad is not None and in_grad.weight == 0.0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.system.scaler is None else self.system.scaler.scale(loss)

    @property
    def scale(self) -> float:
        return 1.0 if self.system.scaler is None else self.system.scaler.get_scale()

    def called(self, expected: bool, call, *arguments: object, **named: object) -> object:
        """The call, which must raise a RuntimeError unless `expected`."""
        with contextlib.nullcontext() if expected else pytest.raises(RuntimeError):
            return call(*arguments, **named)

    def with_scale(self) -> None:
        """A GradScaler makes the tensor of its scale when first called; copies come without."""
        if self.system.scaler is not None:
            self.system.scaler.scale(torch.zeros(()))

    def look(self) -> None:
        """See what a step has made of `.grad` where nobody says what it does."""
        if not self.oracle.knows_grads:
            for p, cell in zip(self.system.parameters, self.oracle.slots):
                if p.grad is not None and cell is not None:
                    cell.value = p.grad.to(torch.float64, copy=True)
            self.oracle.knows_grads = True

    def make_way(self) -> None:
        """Before a backward pass of the wrapper's. Nobody says whether what lies in `.grad` is
        added to there, or in a window: then not where two share it."""
        slots = self.oracle.slots
        if self.oracle.open.in_grad is None:
            self.parts = [(part, cell) for part, cell in self.parts if cell not in slots]
            if slots[0] is slots[1]:
                self.assign_none(0)

    # Micro-batches

    @rule(values=coefficients(), weight=weights, as_tensor=st.booleans())
    def backward(self, values, weight, as_tensor) -> None:
        self.make_way()
        expected = self.oracle.backward(gradient(values), weight)
        given = torch.tensor(weight) if as_tensor else weight
        self.called(expected, self.opt.backward, self.system.loss(values), given)

    @rule(values=coefficients(), weight=weights)
    def backward_and_step(self, values, weight) -> None:
        self.backward(values, weight, False)
        self.step()

    @precondition(lambda self: not self.counts_for_nothing())
    @rule(values=coefficients(), scaled=st.booleans())
    def plain_backward(self, values, scaled) -> None:
        self.oracle.add(gradient(values), self.scale if scaled else 1.0)
        loss = self.system.loss(values)
        (self.scaled(loss) if scaled else loss).backward()

    @rule(weight=weights)
    def accumulate(self, weight) -> None:
        self.called(self.oracle.accumulate(weight), self.opt.accumulate, weight)

    @rule(
        parts=st.lists(st.tuples(st.booleans(), coefficients()), min_size=1, max_size=3),
        weight=weights,
    )
    def micro_batch(self, parts, weight) -> None:
        self.make_way()
        expected = self.oracle.micro_batch([(t, gradient(v)) for t, v in parts], weight)

        def run() -> None:
            with self.opt.micro_batch():
                for through, values in parts:
                    loss = self.system.loss(values)
                    if through:
                        self.opt.backward(loss, weight)
                    elif self.given.scaler == "own":
                        self.scaled(loss).backward()
                    else:
                        loss.backward()

        self.called(expected, run)

    def fails(self, call) -> None:
        """A backward pass that raises. It may drop the window where that could be added to."""
        self.make_way()
        before = self.oracle.open.micro_batches
        with pytest.raises(Planned) as raised:
            call()
        dropped = self.opt.accumulation_state_dict()["micro_batches"] == 0
        if before:
            assert not dropped or self.given.policy in NEVER_APART
            notes = " ".join(getattr(raised.value, "__notes__", ()))
            assert ("the open window was dropped" in notes) == dropped
        self.oracle.fail(dropped)

    @rule(values=coefficients(), weight=weights, index=indices, inside=st.booleans())
    def failing_backward(self, values, weight, index, inside) -> None:
        """A hook of the user's raises in the backward pass."""
        if values[index] is None:
            return

        def run() -> None:
            with self.opt.micro_batch() if inside else contextlib.nullcontext():
                self.opt.backward(self.system.loss(values), weight)

        hook = self.system.parameters[index].register_hook(planned)
        self.fails(run)
        hook.remove()

    @rule(values=coefficients())
    def failing_micro_batch(self, values) -> None:
        def run() -> None:
            with self.opt.micro_batch():
                self.opt.backward(self.system.loss(values))
                self.system.loss(values).backward()
                raise Planned

        self.fails(run)

    # Raw gradients

    @precondition(lambda self: not self.counts_for_nothing())
    @rule(index=indices, value=pairs, part=st.booleans())
    def assign(self, index, value, part) -> None:
        parameter = self.system.parameters[index]
        grad = wide(value, index).to(parameter.dtype)
        cell = Cell(wide(value, index))
        if part:
            grad = torch.stack([grad, grad])[1]
            self.parts = [*self.parts[-3:], (grad, cell)]
        self.users = [*self.users[-3:], (grad, cell)]
        parameter.grad, self.oracle.slots[index] = grad, cell

    @precondition(lambda self: self.users and not self.counts_for_nothing())
    @rule(index=indices, which=st.integers(0, 3))
    def assign_again(self, index, which) -> None:
        grad, cell = self.users[which % len(self.users)]
        left = self.oracle.left[index]
        if grad.shape != SHAPES[index] or cell in self.oracle.open.taken:
            return  # an error: the window holds its sum in it
        if left is not None and left.cell is cell:
            return  # the very tensor that a step left there cannot be told from itself
        cell.value = grad.to(torch.float64, copy=True)  # a window may have held its sum in it
        self.system.parameters[index].grad, self.oracle.slots[index] = grad, cell

    @rule(index=indices)
    def assign_none(self, index) -> None:
        self.system.parameters[index].grad = self.oracle.slots[index] = None

    @rule(to=st.sampled_from([0, 1]))
    def share(self, to) -> None:
        self.system.parameters[to].grad = self.system.parameters[1 - to].grad
        self.oracle.slots[to] = self.oracle.slots[1 - to]

    @precondition(lambda self: not self.counts_for_nothing())
    @rule(index=indices, value=pairs, how=st.sampled_from(["data", "in place", "times"]))
    def write(self, index, value, how) -> None:
        grad, cell = self.system.parameters[index].grad, self.oracle.slots[index]
        if grad is None or cell is None:
            return
        new = cell.value * 2.0 if how == "times" else wide(value, index)
        cell.write(new, counted=how != "data")
        if how == "times":
            grad.mul_(2.0)
        else:
            (grad.data if how == "data" else grad).copy_(new)

    # The window

    @rule()
    def step(self) -> None:
        self.called(self.oracle.step(), self.opt.step)
        self.look()

    @rule(where=st.sampled_from(["pre", "post"]))
    def failing_step(self, where) -> None:
        """A hook of the wrapped step raises, if that is called at all. A clip to a norm that is not
        finite cannot be divided out again."""
        if self.given.policy == "step" and self.given.max_norm and not self.oracle.all_is_finite():
            return
        expected = self.oracle.step(fails=where)
        hook = getattr(self.opt.optimizer, f"register_step_{where}_hook")(planned)
        with contextlib.nullcontext() if expected else pytest.raises((Planned, RuntimeError)):
            self.opt.step()
        hook.remove()
        self.look()

    @precondition(lambda self: not self.counts_for_nothing())
    @rule(values=coefficients(), clears=st.booleans(), fails=st.booleans())
    def closure_step(self, values, clears, fails) -> None:
        def closure() -> float:
            if clears:
                self.opt.zero_grad()
            loss = self.system.loss(values)
            (self.scaled(loss) if self.given.scaler == "own" else loss).backward()
            if fails:
                raise Planned
            return 3.0

        if clears:
            self.oracle.zero_grad(True)
        self.oracle.add(gradient(values), self.oracle.own_scale())
        if fails:
            self.oracle.stepped = False
            self.oracle.unsure()
            with pytest.raises(Planned):
                self.opt.step(closure)
        else:
            value = self.called(self.oracle.step(), self.opt.step, closure)
            assert value in (None, 3.0)
        self.look()

    @rule()
    def flush(self) -> None:
        self.called(self.oracle.flush(), self.opt.flush)
        self.look()

    @rule()
    def discard(self) -> None:
        self.oracle.discard()
        self.opt.discard()

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none) -> None:
        self.oracle.zero_grad(set_to_none)
        self.opt.zero_grad(set_to_none)

    # Scalers

    @precondition(lambda self: self.given.scaler is not None)
    @rule(value=st.sampled_from([1.0, 2.0, 8.0]))
    def change_scale(self, value) -> None:
        self.system.scaler.update(value)
        self.oracle.scale.value = value

    @precondition(lambda self: self.given.scaler == "outer")
    @rule(unscale=st.booleans(), clears=st.booleans())
    def scaler_step(self, unscale, clears) -> None:
        scaler, oracle = self.system.scaler, self.oracle
        if any(map(oracle.used_up, PARAMETERS)):  # torch looks at that too, and multiplies it
            return
        if oracle.accumulated is None or all(p.grad is None for p in self.system.parameters):
            return
        if oracle.accumulated:
            text = (
                r"step must be called directly, not through scaler\.step, got gradients taken in "
            )
            with pytest.raises(RuntimeError, match=text + "before the GradScaler"):
                scaler.step(self.opt)
            oracle.stepped = False
            scaler.update()
            return
        # Torch looks at, and divides, every tensor in `.grad`, one that two share twice.
        cells = [c for c in oracle.slots if c is not None]
        bad = any(not bool(c.value.isfinite().all()) for c in cells)
        if unscale:
            scaler.unscale_(self.opt)
            for cell in cells:
                cell.write(cell.value / self.scale)
        self.called(oracle.step(1.0 if unscale else self.scale, bad), scaler.step, self.opt)
        scaler.update()
        self.look()
        if clears:
            self.zero_grad(True)

    # Copies

    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def copy(self, how) -> None:
        old = self.system
        pickled = pickle.loads(pickle.dumps(old)) if how == "pickle" else None
        self.system = pickled or copy.deepcopy(old)
        self.with_scale()
        old.opt.discard()
        self.oracle.copied()

    @rule(fresh=st.booleans())
    def reload(self, fresh) -> None:
        """The open window, into this wrapper or into another."""
        packed = self.opt.accumulation_state_dict()
        if fresh:
            old, self.system = self.system, System(self.given)
            for new, p in zip(self.system.parameters, old.parameters):
                new.data.copy_(p)
            self.opt.load_state_dict(copy.deepcopy(old.opt.state_dict()))
            if old.scaler is not None:
                self.system.scaler.load_state_dict(old.scaler.state_dict())
                self.with_scale()
            old.opt.discard()
            self.oracle.copied()
            self.oracle.stepped, self.oracle.last = False, None
            self.oracle.accumulated = False
        else:
            self.oracle.take_out()
            self.oracle.open.taken = []
            self.oracle.unsure()
        self.opt.load_accumulation_state_dict(packed)

    # Invariants

    def same(self, mine: Tensor, theirs: Tensor) -> None:
        tolerance = TOLERANCE[self.given.dtype]
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )

    @invariant()
    def agrees(self) -> None:
        self.parameters_are_the_oracles()
        self.gradients_lie_where_they_should()
        self.main_gradients_are_the_oracles()
        self.reports_are_the_oracles()
        self.nothing_is_left_behind()

    def parameters_are_the_oracles(self) -> None:
        for mine, theirs in zip(self.system.parameters, self.oracle.parameters):
            self.same(mine.detach(), theirs.detach())
            if self.given.dtype != torch.float64:  # rounding must not add up
                theirs.data.copy_(mine.detach())

    def gradients_lie_where_they_should(self) -> None:
        slots = self.oracle.slots
        for i, (p, cell) in enumerate(zip(self.system.parameters, slots)):
            if p.grad is None and self.oracle.used_up(i):  # which may go at any time
                slots[i] = cell = None
            assert (p.grad is None) == (cell is None)
            if cell is not None:
                self.same(p.grad, cell.value)
                if self.given.dtype != torch.float64:  # rounding must not add up
                    cell.value = p.grad.to(torch.float64, copy=True)
        shared = slots[0] is not None and slots[0] is slots[1]
        grads = [p.grad for p in self.system.parameters]
        assert (grads[0] is not None and grads[0] is grads[1]) == shared
        for part, cell in self.parts:  # nobody writes those that are copied
            self.same(part, cell.value)

    def main_gradients_are_the_oracles(self) -> None:
        for i, p in enumerate(self.system.parameters):
            mine, theirs = self.opt.main_grad(p), self.oracle.main_grad(i)
            if theirs is None or not theirs.isfinite().all():
                assert mine is None or theirs is not None
                continue
            assert mine is not None
            self.same(mine, theirs)

    def reports_are_the_oracles(self) -> None:
        if self.given.scaler == "own":
            assert self.scale == self.oracle.scale.value
        assert self.opt.stepped == self.oracle.stepped
        mine, theirs = self.opt.last, self.oracle.last
        assert (mine is None) == (theirs is None)
        if theirs is None:
            return
        assert mine.skipped == theirs.skipped
        assert mine.micro_batches == theirs.micro_batches
        assert mine.weight.item() == theirs.weight
        # The wrapper's own scaler: a window may keep the scale that it began with.
        scales = theirs.scales if self.given.scaler == "own" else theirs.scales[-1:]
        assert mine.loss_scale.item() in scales
        assert math.isnan(mine.total_norm.item()) or not math.isnan(theirs.total_norm)
        if math.isfinite(theirs.total_norm) and not theirs.skipped:
            tolerance = max(1e-5, TOLERANCE[self.given.dtype])
            assert mine.total_norm.item() == pytest.approx(theirs.total_norm, rel=tolerance)
            assert mine.clip_coef.item() == pytest.approx(theirs.clip_coef, rel=tolerance)

    def nothing_is_left_behind(self) -> None:
        assert torch.is_grad_enabled()
        for optimizer in (self.opt, self.opt.optimizer):
            assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
        assert not any(p._post_accumulate_grad_hooks for p in self.system.parameters)


NIGHTLY = settings.get_current_profile_name() == "nightly"

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=examples(300, nightly=20_000),
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
if NIGHTLY:
    TestMachine = pytest.mark.timeout(0)(TestMachine)
