"""Uses that train wrongly without a word: one warning each, and none of the usual loops."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support import optimizer_oracle
from support.optimizer_oracle import (
    INF,
    NAN,
    OP,
    accumulated,
    assert_equal,
    growing_scaler,
    in_parts,
    loss_of,
    make_batches,
    make_model,
    one_call,
    outer_scaler,
    outer_scaler_unscaled,
    own_backward,
    run,
    sgd,
    wrapped,
    wrapped_zeros,
)
from support.recorded_warnings import warnings_as
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import accumext
from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

Loop = Callable[[], object]
WRONG: list[Any] = []  # loops, and what is said of each
RIGHT: list[Any] = []  # loops of which nothing is said


def cases(loop: Callable[..., object], values: Sequence[object]) -> list[tuple[Loop, str]]:
    """A loop with its name, or one of each value."""
    named = [(partial(loop, v), f"{loop.__name__}-{getattr(v, '__name__', v)}") for v in values]
    return named or [(loop, loop.__name__)]


def wrong(text: str, *values: object) -> Callable[[Any], Any]:
    def add(loop: Any) -> Any:
        WRONG.extend(pytest.param(call, text, id=name) for call, name in cases(loop, values))
        return loop

    return add


def right(*values: object) -> Callable[[Any], Any]:
    def add(loop: Any) -> Any:
        RIGHT.extend(pytest.param(call, id=name) for call, name in cases(loop, values))
        return loop

    return add


def warnings_of(use: Loop) -> list[Any]:
    with warnings_as("always") as said:
        use()
    return [w for w in said if str(w.message).startswith(OP)]


# Steps and micro-batches


@wrong("window=3 counts this call of step as one micro-batch", True, False)
def a_step_after_every_window_or_a_clip_of_every_micro_batch(clips):
    parameter, opt = wrapped_zeros(3)
    for i in range(12):
        (parameter / 3).backward()
        if clips:
            clip_grad_norm_([parameter], 0.1)
        if clips or (i + 1) % 3 == 0:
            opt.step()
            opt.zero_grad()
    opt.flush()


@wrong("window=4 counts this call of step as one", "", "unscaled", "unscaled and clipped")
def a_scaler_around_every_window(how):
    parameter, opt = wrapped_zeros(4)
    scaler = torch.amp.GradScaler("cpu")
    for i in range(16):
        scaler.scale(parameter / 4).backward()
        if i % 4 == 3:
            if how:
                scaler.unscale_(opt)
            if how.endswith("clipped"):
                clip_grad_norm_([parameter], 0.1)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()


def unrolled(model, other, batch):
    """Autograd adds the gradients of several uses in place."""
    (loss_of(model, batch) + loss_of(model, batch + 1) + loss_of(model, batch + 2)).backward()


def norm_is_logged(model, other, batch):
    """Torch multiplies by 1."""
    loss_of(model, batch).backward()
    clip_grad_norm_(model.parameters(), INF)


def zeros_are_left(model, other, batch):
    model.zero_grad(set_to_none=False)
    loss_of(model, batch).backward()


def another_loss_reaches_it(model, other, batch):
    """The generator's, after which the discriminator clears its gradients."""
    model(other(batch)).sum().backward()
    model.zero_grad()
    loss_of(model, batch).backward()


def several_losses(model, other, batch):
    """Some parameters are in one of them alone."""
    loss_of(model, batch).backward()
    model[0](batch).sum().backward()


def a_hook_doubles(model, other, batch):
    handle = model[0].weight.register_hook(lambda grad: 2 * grad)
    loss_of(model, batch).backward()
    handle.remove()


def in_ddp(model, other, batch):
    """It writes the gradients that it has reduced."""
    other.ddp = vars(other).get("ddp") or DistributedDataParallel(model)
    loss_of(other.ddp, batch).backward()


ONE_PASS = [unrolled, norm_is_logged, zeros_are_left, another_loss_reaches_it, several_losses]


@right(in_ddp, *ONE_PASS, a_hook_doubles)
def a_micro_batch_of_ones_own(backward):
    model, other = make_model(), nn.Linear(3, 3).double()
    opt = wrapped(model, window=2)
    for batch in make_batches(6):
        backward(model, other, batch)
        opt.step()
        if backward is not zeros_are_left:
            opt.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())


@right(one_call, own_backward, accumulated, outer_scaler, outer_scaler_unscaled, in_parts)
def the_usual_loop(loop):
    model = make_model()
    run(wrapped(model, window=2), model, make_batches(4), loop, None, growing_scaler())


@wrong("comes into a window of 1 that is full", 1)
@wrong("comes into a window of 4 that is full", 4)
def token_by_token(window):
    """As `tbptt(backward=opt.backward)` does."""
    model = make_model()
    opt = wrapped(model, window=window)
    for batch in make_batches(2):
        for row in batch:
            opt.backward(loss_of(model, row))
        opt.step()


@wrong("comes into a window of 1 that is full", 1)
@wrong("comes into a window of 4 that is full", 4)
def accumulated_alone(window):
    model = make_model()
    opt = wrapped(model, window=window)
    for batch in make_batches(9):
        loss_of(model, batch).backward()
        opt.accumulate()
    opt.step()


@wrong("comes into a window of 1 that is full", 1)
@wrong("comes into a window of 4 that is full", 4)
def stepped_by_hand(window):
    model = make_model()
    opt = wrapped(model, window=window)
    for batch in make_batches(9):
        opt.backward(loss_of(model, batch))
        opt.optimizer.step()
    opt.discard()


def with_a_schedule(rate, whenever):
    model = make_model()
    opt = wrapped(model, partial(torch.optim.Adam, lr=rate), window=4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    for batch in make_batches(12):
        one_call(opt, loss_of(model, batch))
        if whenever or opt.stepped:
            schedule.step()


@wrong("if opt.stepped: schedule.step()", 0.1, torch.tensor(0.1))
def a_rate_that_changes_inside_a_window(rate):
    with_a_schedule(rate, whenever=True)


@right(0.1, torch.tensor(0.1))
def a_rate_that_changes_between_two(rate):
    with_a_schedule(rate, whenever=False)


@wrong("pass max_norm to the optimizer")
def a_clip_of_what_lies_in_the_window():
    model = make_model()
    opt = wrapped(model, window=4)
    for batch in make_batches(8):
        opt.backward(loss_of(model, batch))
        accumext.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
    accumext.clip_grad_norm_(model.parameters(), 0.1)  # where no window is open


# Windows that are lost


@right("flush", "discard", "accumulation_state_dict")
def an_end_of_training(end):
    parameter, opt = wrapped_zeros(3)
    opt.backward(parameter * 1)
    if end is not None:
        getattr(opt, end)()


def test_the_last_window_is_lost_without_a_flush(monkeypatch):
    """Not after an error that ends the program, which says more."""
    (said,) = warnings_of(lambda: an_end_of_training(None))
    assert "ended with micro-batches in its window that no step has used, 1." in str(said.message)
    monkeypatch.setattr(sys, "last_type", ZeroDivisionError, raising=False)
    assert warnings_of(lambda: an_end_of_training(None)) == []


PROGRAM = """
import torch, accumext
p = torch.nn.Parameter(torch.zeros(()))
opt = accumext.AccumulatingOptimizer(torch.optim.SGD([p]), window=3)
opt.backward(p * 1)
"""


def test_the_end_of_a_program_says_it_too():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert "that no step has used" in done.stderr


@wrong("a window was skipped, for inf or NaN in the gradient of weight.", 1, 2)
def a_skip_without_a_scaler(window):
    parameter, opt = wrapped_zeros(window)
    for _ in range(4 * window):
        opt.backward(parameter * NAN)
        opt.step()


@wrong("a window was skipped")
def a_scale_that_finds_nothing():
    """It is quiet while the scale may be too large, until 1."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    parameter, opt = wrapped_zeros(scaler=scaler)
    for _ in range(3):
        one_call(opt, parameter * NAN)
    assert "skip" not in opt._box.warned
    for _ in range(3):
        one_call(opt, parameter * NAN)
    assert scaler.get_scale() == 0.125


@right()
def a_skip_that_an_outer_scaler_knows_of():
    parameter, opt = wrapped_zeros()
    outer_scaler(opt, parameter * NAN, growing_scaler())


@wrong("opt.backward(loss) for every loss, or scaler.scale(loss).backward()")
def a_loss_beside_those_that_are_scaled():
    parameter, opt = wrapped_zeros(2, scaler=torch.amp.GradScaler("cpu"))
    for _ in range(4):
        one_call(opt, parameter * 1)
        own_backward(opt, parameter * 1)


# Losses and gradients that go astray


def cleared(model, opt, batch):
    loss_of(model, batch).backward()
    opt.zero_grad()
    opt.step()


def of_another_model(model, opt, batch):
    one_call(opt, loss_of(make_model(), batch))


def of_new_parameters(model, opt, batch):
    model[0], model[2] = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    one_call(opt, loss_of(model, batch))


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("loop", [cleared, of_another_model, of_new_parameters])
def test_steps_without_a_gradient_are_told_once_after_a_window_of_them(loop, window):
    model, calls = make_model(), max(window, 2)
    opt = wrapped(model, window=window)

    def train(batches: Sequence[torch.Tensor]) -> None:
        for batch in batches:
            loop(model, opt, batch)

    assert warnings_of(lambda: train(make_batches(calls - 1))) == []
    (said,) = warnings_of(lambda: train(make_batches(2 * calls)))
    assert f"{calls} calls of step found no gradient" in str(said.message)


@right(True, False)
def parameters_without_gradients_for_a_while(frozen):
    """All are frozen, or one micro-batch in two reaches them."""
    parameter, opt = wrapped_zeros(2)
    parameter.requires_grad_(not frozen)
    for i in range(8):
        if i % 2 and not frozen:
            opt.backward(parameter * 1)
        opt.step()


@wrong("Another AccumulatingOptimizer has taken gradients of them: use one", True, False)
def a_second_wrapper_of_the_same_parameters(by_backward):
    parameter, first = wrapped_zeros(3)
    second = AccumulatingOptimizer(sgd([parameter]), window=3)
    for _ in range(9):
        if by_backward:
            first.backward(parameter * 1)
            second.step()
            first.step()
        else:
            (parameter * 1).backward()
            first.step()
            second.step()


@right()
def two_wrappers_with_losses_of_their_own():
    parameter, first = wrapped_zeros(3)
    second = AccumulatingOptimizer(sgd([parameter]), window=2)
    for _ in range(12):
        one_call(first, parameter * 1)
        one_call(second, parameter * 2)
    assert parameter.item() == -4 * 1 - 6 * 2


# Losses that are divided twice


@wrong("Pass the loss itself: opt.backward(loss)", "/", "*")
def a_loss_that_is_divided_by_the_window(how):
    model = make_model()
    opt = wrapped(model, window=4)
    for batch in make_batches(16):
        loss = loss_of(model, batch)
        one_call(opt, loss / 4 if how == "/" else loss * (1 / 4))


def a_sum(model, x):
    return functional.mse_loss(model(x), -x[:, :2], reduction="sum")


def in_two_parts(opt, model, x):
    with opt.micro_batch():
        for part in (x[:2], x[2:]):
            opt.backward(loss_of(model, part) / 2)
    opt.step()


QUOTIENTS = {  # which are no mean over a window of two
    "by another": lambda opt, model, x: one_call(opt, loss_of(model, x) / 3),
    "two losses": lambda opt, model, x: one_call(opt, (loss_of(model, x) + loss_of(model, -x)) / 2),
    "a sum": lambda opt, model, x: one_call(opt, model(x).square().sum() / 2),
    "a summed loss": lambda opt, model, x: one_call(opt, a_sum(model, x) / 2),
    "half": lambda opt, model, x: one_call(opt, 0.5 * loss_of(model, x)),
    "two parts": in_two_parts,
    "of a sum of losses": lambda opt, model, x: one_call(opt, loss_of(model, x) / 2),
}


@right(*QUOTIENTS)
def other_quotients(name):
    model = make_model()
    reduction = "sum" if name == "of a sum of losses" else "mean"
    opt = wrapped(model, window=2, reduction=reduction)
    for batch in make_batches(8):
        QUOTIENTS[name](opt, model, batch)


@pytest.mark.parametrize(("loop", "text"), WRONG)
def test_a_wrong_loop_is_told_once_and_where(loop, text):
    (said,) = warnings_of(loop)
    assert text in str(said.message)
    assert said.filename in (__file__, optimizer_oracle.__file__)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("loop", RIGHT)
def test_a_right_loop_is_told_nothing(loop):
    assert warnings_of(loop) == []


# Warnings that are errors, and what watching costs


def test_a_warning_that_is_an_error_leaves_the_window_closed():
    parameter, opt = wrapped_zeros()
    opt.backward(parameter * NAN)
    with warnings_as("error"), pytest.raises(UserWarning, match="a window was skipped"):
        opt.step()
    assert opt.last.skipped
    one_call(opt, parameter * 2)
    assert parameter.item() == -2.0


def test_a_warning_that_is_an_error_comes_before_anything_has_changed():
    model = make_model()
    opt = wrapped(model, window=2)
    opt.backward(loss_of(model, make_batches(1)[0]) / 2)
    before = [opt.main_grad(p) for p in model.parameters()]
    loss = loss_of(model, make_batches(1)[0]) / 2
    with warnings_as("error"), pytest.raises(UserWarning, match="was divided by 2"):
        opt.backward(loss)
    assert_equal([opt.main_grad(p) for p in model.parameters()], before)
    one_call(opt, loss)
    assert opt.stepped


@pytest.mark.parametrize("loop", [one_call, own_backward, outer_scaler])
@pytest.mark.parametrize("window", [1, 2])
def test_nothing_is_watched_after_two_windows(loop, window):
    model = make_model()
    opt = wrapped(model, window=window)
    for batch in make_batches(2 * window):
        assert opt._box.watch is not None
        run(opt, model, [batch], loop, None, growing_scaler())
    assert opt._box.watch is None
