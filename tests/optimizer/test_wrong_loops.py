"""Uses that would train wrongly without a word: one warning each."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support import optimizer_oracle as oracle
from support import watched_loops
from support.optimizer_oracle import NAN, OP, loss_of, one_call
from support.recorded_warnings import warnings_as
from support.watched_loops import (
    RATES,
    counted,
    entropy,
    inside_another,
    quotient,
    scheduled,
    train,
    unscaled_and_clipped,
    warnings_of,
)
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import accumext
from accumext.optimizer import _engine
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

# Steps, clips and losses at the wrong place


def step_after_every_window(opt, model, x, number, scaler):
    loss_of(model, x).backward()
    if number % 4 == 3:
        opt.step()
        opt.zero_grad()


def clip_of_every_micro_batch(opt, model, x, number, scaler):
    loss_of(model, x).backward()
    clip_grad_norm_(model.parameters(), 1e-3)
    opt.step()
    opt.zero_grad()


def scaler_around_every_window(opt, model, x, number, scaler, unscales=False, clips=False):
    scaler.scale(loss_of(model, x)).backward()
    if number % 4 == 3:
        if unscales:
            scaler.unscale_(opt)
        if clips:
            clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def token_by_token(opt, model, x, number, scaler):
    """As `tbptt(backward=opt.backward)` does."""
    for row in x:
        opt.backward(loss_of(model, row))
    opt.step()


def several_passes(opt, model, x, number, scaler, count):
    """Of one micro-batch, which nobody says."""
    for part in x.chunk(count):
        opt.backward(loss_of(model, part))
    opt.step()


def pixels_of(logits, targets, **options):
    return functional.cross_entropy(logits[:, :, None], targets.long()[:, :1], **options)


def of_different_sizes(opt, model, x, number, scaler, sizes=(3, 2, 1, 3)):
    """Batches, of which some have one row."""
    counted(opt, model, x[: sizes[number % len(sizes)]], number, scaler, reduction="sum")


def flushed_after_every_one(opt, model, x, number, scaler):
    opt.backward(loss_of(model, x))
    opt.flush()


def both_backwards(opt, model, x, number, scaler, **options):
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    opt.backward(loss, **options)
    opt.step()


def accumulated_alone(opt, model, x, number, scaler):
    loss_of(model, x).backward()
    opt.accumulate()


def stepped_by_hand(opt, model, x, number, scaler):
    opt.backward(loss_of(model, x))
    opt.optimizer.step()


def clip_of_the_window(opt, model, x, number, scaler):
    opt.backward(loss_of(model, x))
    accumext.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()


class Around:
    """An optimizer around another that acts at every call of its step, and counts the calls."""

    def __init__(self, inner, counts):
        self.inner, self.calls, self.counts = inner, 0, counts
        self.slow = [p.detach().clone() for p in self.parameters()]

    def parameters(self):
        return [p for group in self.inner.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.calls += 1
        if self.counts:
            for group in self.inner.param_groups:
                group["calls"] = self.calls
        elif self.calls % 5 == 0:
            torch._foreach_lerp_(self.slow, self.parameters(), 0.5)
            torch._foreach_copy_(self.parameters(), self.slow)


def around(opt, model, x, number, scaler, counts, loop=one_call):
    outer = vars(opt).setdefault("_outer", Around(opt, counts))
    (opt.backward if loop is one_call else torch.Tensor.backward)(loss_of(model, x))
    outer.step()
    opt.zero_grad()


def by_the_wrapped_step_too(opt, model, x, number, scaler):
    """Of a loss whose gradients of a layer add up to 0."""
    entropy(model, x).backward()
    opt.optimizer.step()
    opt.step()
    opt.zero_grad()


class TwoSteps(torch.optim.SGD):
    """As SAM has them."""

    def first_step(self):
        pass

    def second_step(self):
        super().step()


def by_its_own_steps(opt, model, x, number, scaler):
    loss_of(model, x).backward()
    opt.first_step()
    opt.second_step()
    opt.zero_grad()


def entropy_2d(model, x):
    logits = model(x).unsqueeze(0).transpose(1, 2).unsqueeze(-1)
    return functional.cross_entropy(logits, torch.zeros(1, len(x), 1, dtype=torch.long))


def nan(opt, model, x, number, scaler):
    one_call(opt, loss_of(model, x) * NAN)


def beside_those_that_are_scaled(opt, model, x, number, scaler):
    (oracle.own_backward if number % 2 else one_call)(opt, loss_of(model, x))


def scaled_and_never_unscaled(opt, model, x, number, scaler, part=1):
    one_call(opt, scaler.scale(loss_of(model, x)) / part)


def scaled_in_two_parts(opt, model, x, number, scaler):
    with opt.micro_batch():
        for part in x.chunk(2):
            opt.backward(scaler.scale(loss_of(model, part)))
    opt.step()


ONCE = "window=4 counts this call of step as one micro-batch"
SKIPPED = "a window was skipped, for inf or NaN in the gradient of "
HALVING = torch.amp.GradScaler("cpu", init_scale=8.0)
WRONG = {
    "a step after every window": (step_after_every_window, {}, ONCE),
    "a clip of every micro-batch": (clip_of_every_micro_batch, {}, "leave the clip to max_norm"),
    "a scaler": (scaler_around_every_window, {}, ONCE),
    "a scaler that unscales": (partial(scaler_around_every_window, unscales=True), {}, ONCE),
    "a clip, too": (partial(scaler_around_every_window, unscales=True, clips=True), {}, ONCE),
    "a clip of the window": (clip_of_the_window, {}, "pass max_norm to the optimizer"),
    "a quotient": (quotient(lambda model, x: entropy(model, x) / 4), {}, "Pass the loss itself"),
    "one of pixels": (quotient(lambda m, x: entropy_2d(m, x) / 4), {}, "Pass the loss itself"),
    "two passes": (
        partial(several_passes, count=2),
        {},
        "every call of step came after 2 calls of opt.backward",
    ),
    "three passes": (partial(several_passes, count=3), {}, "comes into a window of 4 that is full"),
    **{
        f"a sum of what its weight counts, {name}": (
            partial(counted, reduction="sum", **options),
            {},
            "Pass the mean, opt.backward(loss / n, weight=n)",
        )
        for name, options in {
            "rows": {},
            "but for ignored ones": {"ignored": 1},
            "pixels": {"loss": pixels_of},
            "squares": {"loss": functional.mse_loss},
        }.items()
    },
    "a sum of what its weight counts, some of one row": (
        of_different_sizes,
        {},
        "Pass the mean, opt.backward(loss / n, weight=n)",
    ),
    **{
        f"a flush after every one of {size}": (
            flushed_after_every_one,
            {"window": size},
            f"flush closed {size} windows in a row that held one micro-batch",
        )
        for size in (2, 4)
    },
    **{
        f"a pass of the loss's own, {name}": (
            partial(both_backwards, **weight),
            options,
            "Leave loss.backward() out",
        )
        for name, weight, options in (
            ("with a weight", {"weight": 3.0}, {}),
            ("kept apart", {}, {"on_nonfinite": "raise"}),
        )
    },
    "a clip after a scaler": (unscaled_and_clipped, {}, "clips one micro-batch, not the window"),
    "a clip after it, windows of 2": (unscaled_and_clipped, {"window": 2}, "Leave it to max_norm"),
    **{
        f"around that {'counts' if counts else 'writes'}, {loop.__name__}": (
            partial(around, counts=counts, loop=loop),
            {},
            "put AccumulatingOptimizer outermost",
        )
        for counts in (True, False)
        for loop in (one_call, oracle.own_backward)
    },
    "by the wrapped step, too": (by_the_wrapped_step_too, {}, "leave that out"),
    "in another": (inside_another, {}, "Outer calls step in every micro-batch"),
    "steps of its own": (
        by_its_own_steps,
        {"make": TwoSteps, "max_norm": 1.0},
        "first_step steps at once on what is in .grad, without window and max_norm",
    ),
    "NaN": (nan, {}, SKIPPED),
    "NaN in a micro-batch": (nan, {"window": 1, "on_nonfinite": "skip_micro_batch"}, SKIPPED),
    "a scale that finds nothing": (nan, {"window": 1, "scaler": HALVING}, "a window was skipped"),
    **{
        f"scaled alone, {name}": (body, {}, "the loss was scaled, and nobody unscales its grad")
        for name, body in {
            "opt.backward": scaled_and_never_unscaled,
            "a third of it": partial(scaled_and_never_unscaled, part=3),
            "in two parts": scaled_in_two_parts,
        }.items()
    },
    "beside those that are scaled": (
        beside_those_that_are_scaled,
        {"scaler": torch.amp.GradScaler("cpu")},
        "opt.backward(loss) for every loss, or scaler.scale(loss).backward()",
    ),
}
for loop in (token_by_token, accumulated_alone, stepped_by_hand):
    for size in (1, 4):
        text = f"comes into a window of {size} that is full"
        WRONG[f"{loop.__name__}, {size}"] = (loop, {"window": size}, text)
for name, rate in RATES.items():
    options = {"make": partial(torch.optim.Adam, lr=rate)}
    told = "if opt.stepped: schedule.step()"
    WRONG[f"a rate that is a {name}"] = (partial(scheduled, whenever=True), options, told)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_is_told_once_and_where(name):
    body, options, text = WRONG[name]
    (said,) = warnings_of(lambda: train(body, **{"window": 4, **options}))
    assert text in str(said.message)
    assert said.filename in (__file__, oracle.__file__, watched_loops.__file__)


def test_a_scaler_that_looks_for_its_scale_is_told_nothing_until_it_is_one():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert warnings_of(lambda: train(nan, 3, scaler=scaler)) == []
    assert scaler.get_scale() == 1.0


def by_both(parameter, first, second):
    (parameter * 1).backward()
    first.step()
    second.step()


def by_one_and_the_other(parameter, first, second):
    first.backward(parameter * 1)
    second.step()
    first.step()


def each_by_its_own(parameter, first, second):
    one_call(first, parameter * 1)
    one_call(second, parameter * 2)


@pytest.mark.parametrize("loop", [by_both, by_one_and_the_other, each_by_its_own])
def test_a_second_wrapper_of_the_same_parameters_is_told_once_unless_it_has_losses(loop):
    parameter, first = oracle.wrapped_zeros(3)
    second = AccumulatingOptimizer(oracle.sgd([parameter]), window=3)

    def train():
        for _ in range(9):
            loop(parameter, first, second)

    said = [str(warning.message) for warning in warnings_of(train)]
    assert len(said) == (loop is not each_by_its_own)
    assert all(
        "Another AccumulatingOptimizer has taken gradients of them: use one" in t for t in said
    )


# Optimizers that step in the backward pass


class Released(torch.optim.SGD):
    """As optimi's with gradient release, and LOMO: hooks step, `step` does nothing."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        for parameter in self.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(self.release)

    @torch.no_grad()
    def release(self, parameter):
        parameter.sub_(parameter.grad)
        parameter.grad = None

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("loop", [one_call, oracle.own_backward])
def test_a_step_in_the_backward_pass_is_told_once_with_its_cause(loop, window):
    model = oracle.make_model()

    def train():
        opt = oracle.wrapped(model, Released, window=window, max_norm=1.0)
        oracle.run(opt, model, oracle.make_batches(6), loop)

    (said,) = warnings_of(train)
    assert str(said.message).startswith(
        f"{OP}: hooks of the parameters take gradients out of .grad"
    )


def test_a_released_part_is_told_at_the_first_backward_pass():
    model = oracle.make_model()
    Released(model[0].parameters(), lr=0.1)
    opt = oracle.wrapped(model, window=2)
    (said,) = warnings_of(lambda: opt.backward(loss_of(model, oracle.make_batches(1)[0])))
    assert "a step per backward pass" in str(said.message)
    opt.discard()


def test_a_wrapper_of_each_parameter_may_step_in_a_hook():
    """torch's recipe for less memory, with windows: nothing is told, and nothing is wrong."""
    model, batches = oracle.make_model(), oracle.make_batches(6)
    opts = {p: AccumulatingOptimizer(oracle.sgd([p]), window=3) for p in model.parameters()}

    def step(parameter):
        opts[parameter].step()
        opts[parameter].zero_grad()

    for parameter in opts:
        parameter.register_post_accumulate_grad_hook(step)
    assert warnings_of(lambda: [loss_of(model, batch).backward() for batch in batches]) == []
    oracle.assert_close(oracle.parameters_of(model), oracle.train_by_hand(oracle.sgd, batches, 3))


@pytest.mark.parametrize("saved", [False, True])
def test_a_checkpoint_that_comes_into_an_open_window_is_told(saved):
    """Not where the window, too, is of a checkpoint: a run that is resumed may load it first."""
    model, batch = oracle.make_model(), oracle.make_batches(1)[0]
    opt = oracle.wrapped(model, window=4)
    checkpoint = opt.state_dict()
    one_call(opt, loss_of(model, batch))
    if saved:
        opt.load_accumulation_state_dict(opt.accumulation_state_dict())
    said = warnings_of(lambda: opt.load_state_dict(checkpoint))
    assert [("inside a window, whose gradients, of 1 " in str(w.message)) for w in said] == (
        [] if saved else [True]
    )
    opt.discard()
    assert warnings_of(lambda: opt.load_state_dict(checkpoint)) == []


# Truncated sequences


@pytest.mark.parametrize(
    ("k1", "inside", "options", "told"),
    [
        (3, False, {"window": 4}, True),
        (1, False, {"window": 2}, True),
        (3, True, {"window": 4}, False),
        (12, False, {"window": 4}, False),  # one pass
        (3, False, {"window": 1}, None),  # told, as always, when the second one comes
        (3, False, {"window": 5, "reduction": "sum"}, False),  # sums are the sequence's
    ],
)
def test_passes_of_tbptt_outside_of_a_micro_batch_are_told_before_them(k1, inside, options, told):
    model = nn.GRUCell(2, 2)
    opt = oracle.wrapped(model, **options)
    targets, start = torch.randn(12, 3, 2), torch.zeros(3, 2)

    def train():
        for _ in range(2):
            with opt.micro_batch() if inside else nullcontext():
                accumext.tbptt(
                    lambda x, state: (model(x, state),) * 2,
                    targets,
                    start,
                    criterion=functional.mse_loss,
                    feedback="teacher",
                    k1=k1,
                    backward=opt.backward,
                )
            opt.step() if options.get("reduction") != "sum" else opt.flush()

    said = warnings_of(train)
    assert ["tbptt runs a backward pass every k1 steps" in str(w.message) for w in said] == (
        [bool(told)] if told is not False else []
    )
    assert all(warning.filename == __file__ for warning in said)
    opt.discard()


# Gradients from before the wrapper


def by_pass_and_accumulate(opt, loss):
    loss.backward()
    opt.accumulate()


def inside_a_micro_batch(opt, loss):
    with opt.micro_batch():
        opt.backward(loss)


def after_zeros(opt, loss):
    opt.zero_grad(set_to_none=False)
    oracle.own_backward(opt, loss)


def after_zeros_of_the_models(opt, loss):
    for group in opt.param_groups:
        for parameter in group["params"]:
            parameter.grad.zero_()
    oracle.own_backward(opt, loss)


def after_none(opt, loss):
    opt.zero_grad()
    one_call(opt, loss)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    "loop",
    [
        *(one_call, oracle.own_backward, by_pass_and_accumulate, inside_a_micro_batch),
        *(after_zeros, after_zeros_of_the_models, after_none),
    ],
)
def test_gradients_from_before_the_wrapper_are_told_if_they_are_used(loop, window):
    """Not with a window of one, which uses them as the bare optimizer does."""
    model, (before, batch) = oracle.make_model(), oracle.make_batches(2)
    loss_of(model, before).backward()
    opt = oracle.wrapped(model, window=window)
    said = warnings_of(lambda: loop(opt, loss_of(model, batch)))
    assert len(said) == (window > 1 and not loop.__name__.startswith("after"))
    assert all("before the optimizer was wrapped are part of" in str(w.message) for w in said)
    opt.discard()


def test_gradients_that_a_wrapper_has_left_are_no_ones_from_before():
    model, batch = oracle.make_model(), oracle.make_batches(1)[0]
    one_call(oracle.wrapped(model), loss_of(model, batch))
    opt = oracle.wrapped(model, window=2)
    assert warnings_of(lambda: oracle.own_backward(opt, loss_of(model, batch))) == []
    opt.discard()


# Losses that do not reach the parameters


def cleared(model, opt, batch):
    loss_of(model, batch).backward()
    opt.zero_grad()
    opt.step()


def of_another_model(model, opt, batch):
    one_call(opt, loss_of(oracle.make_model(), batch))


def of_new_parameters(model, opt, batch):
    model[0], model[2] = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    one_call(opt, loss_of(model, batch))


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("loop", [cleared, of_another_model, of_new_parameters])
def test_steps_without_a_gradient_are_told_once_after_a_window_of_them(loop, window):
    model, calls = oracle.make_model(), max(window, 2)
    opt = oracle.wrapped(model, window=window)

    def train(batches):
        for batch in batches:
            loop(model, opt, batch)

    assert warnings_of(lambda: train(oracle.make_batches(calls - 1))) == []
    (said,) = warnings_of(lambda: train(oracle.make_batches(2 * calls)))
    assert f"{calls} calls of step found no gradient" in str(said.message)


# Windows that are lost


def ended(end=None):
    parameter, opt = oracle.wrapped_zeros(3)
    opt.backward(parameter * 1)
    if end is not None:
        getattr(opt, end)()


def test_the_last_window_is_lost_without_a_flush(monkeypatch):
    """Not after an error that ends the program, which says more."""
    (said,) = warnings_of(ended)
    assert "ended with micro-batches in its window that no step has used, 1." in str(said.message)
    for end in ("flush", "discard", "accumulation_state_dict"):
        assert warnings_of(partial(ended, end)) == []
    monkeypatch.setattr(sys, "last_type", ZeroDivisionError, raising=False)
    assert warnings_of(ended) == []


PROGRAM = """
import torch, accumext
p = torch.nn.Parameter(torch.zeros(()))
opt = accumext.AccumulatingOptimizer(torch.optim.SGD([p]), window=3)
opt.backward(p * 1)
"""


@pytest.mark.process
def test_the_end_of_a_program_says_it_too():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert "that no step has used" in done.stderr


def test_an_optimizer_that_outlives_its_module_ends_in_silence(monkeypatch):
    """As one that a compiled function holds does at the end of a program."""
    _, opt = oracle.wrapped_zeros()
    monkeypatch.setattr(_engine, "sys", None)
    opt._engine.__del__()


# Warnings that are errors, and what watching costs


def test_a_warning_that_is_an_error_leaves_the_window_closed():
    parameter, opt = oracle.wrapped_zeros()
    opt.backward(parameter * NAN)
    with warnings_as("error"), pytest.raises(UserWarning, match="a window was skipped"):
        opt.step()
    assert opt.last.skipped
    one_call(opt, parameter * 2)
    assert parameter.item() == -2.0


def test_a_warning_that_is_an_error_comes_before_anything_has_changed():
    model, batch = oracle.make_model(), oracle.make_batches(1)[0]
    opt = oracle.wrapped(model, window=3)
    for _ in range(2):
        opt.backward(entropy(model, batch) / 3)
    before = [opt.main_grad(p) for p in model.parameters()]
    loss = entropy(model, batch) / 3
    with warnings_as("error"), pytest.raises(UserWarning, match="was divided by 3"):
        opt.backward(loss)
    oracle.assert_equal([opt.main_grad(p) for p in model.parameters()], before)
    one_call(opt, loss)
    assert opt.stepped


@pytest.mark.parametrize("loop", [one_call, oracle.own_backward, oracle.outer_scaler])
@pytest.mark.parametrize("window", [1, 2])
def test_nothing_is_watched_after_two_windows(loop, window):
    model = oracle.make_model()
    opt = oracle.wrapped(model, window=window)
    for batch in oracle.make_batches(2 * window):
        assert opt._engine.watch is not None
        oracle.run(opt, model, [batch], loop, None, oracle.growing_scaler())
    assert opt._engine.watch is None
