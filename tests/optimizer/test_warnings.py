"""Uses that train wrongly without a word: one warning each, and none of the usual loops."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

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


def warnings_of(use):
    """Return the warnings of a use."""
    with warnings_as("always") as said:
        use()
    return [w for w in said if str(w.message).startswith(OP)]


def said_once(use, text):
    """Check that a use gives one warning with a text in it, which points at a line of the loop."""
    (said,) = warnings_of(use)
    assert text in str(said.message)
    assert said.filename in (__file__, optimizer_oracle.__file__)


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_after_every_window_or_a_clip_of_every_micro_batch_is_said_once(clips):
    parameter, opt = wrapped_zeros(3)

    def train():
        for i in range(12):
            (parameter / 3).backward()
            if clips:
                clip_grad_norm_([parameter], 0.1)
            if clips or (i + 1) % 3 == 0:
                opt.step()
                opt.zero_grad()
        opt.flush()

    (said,) = warnings_of(train)
    assert "window=3 counts this call of step as one micro-batch" in str(said.message)
    assert "leave the clip to max_norm" in str(said.message)
    assert said.filename == __file__


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_around_every_window_too(unscales, clips):
    parameter, opt = wrapped_zeros(4)
    scaler = torch.amp.GradScaler("cpu")

    def train():
        for i in range(16):
            scaler.scale(parameter / 4).backward()
            if i % 4 == 3:
                if unscales:
                    scaler.unscale_(opt)
                if clips:
                    clip_grad_norm_([parameter], 0.1)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()

    said_once(train, "window=4 counts this call of step as one micro-batch")


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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("backward", [in_ddp, *ONE_PASS, a_hook_doubles])
def test_a_micro_batch_of_ones_own_says_nothing(backward):
    model, other = make_model(), nn.Linear(3, 3).double()
    opt = wrapped(model, window=2)

    def train():
        for batch in make_batches(6):
            backward(model, other, batch)
            opt.step()
            if backward is not zeros_are_left:
                opt.zero_grad()

    assert warnings_of(train) == []
    assert torch.tensor([p.isfinite().all() for p in model.parameters()]).all()


LOOPS = [one_call, own_backward, accumulated, outer_scaler, outer_scaler_unscaled, in_parts]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_usual_loops_say_nothing(loop):
    model = make_model()
    opt = wrapped(model, window=2)
    assert warnings_of(lambda: run(opt, model, make_batches(4), loop, None, growing_scaler())) == []


def test_the_last_window_is_lost_without_a_flush():
    def train(end):
        parameter, opt = wrapped_zeros(3)
        opt.backward(parameter * 1)
        end(opt)

    (said,) = warnings_of(lambda: train(lambda opt: None))
    assert "ended with micro-batches in its window that no step has used, 1." in str(said.message)
    for end in ("flush", "discard", "accumulation_state_dict"):
        assert warnings_of(lambda end=end: train(lambda opt: getattr(opt, end)())) == []


PROGRAM = """
import torch, accumext
p = torch.nn.Parameter(torch.zeros(()))
opt = accumext.AccumulatingOptimizer(torch.optim.SGD([p]), window=3)
opt.backward(p * 1)
{end}
"""


@pytest.mark.parametrize(
    ("end", "lost"), [("", True), ("raise SystemExit", True), ("1 / 0", False)]
)
def test_the_end_of_a_program_says_it_too(end, lost):
    """Not after an error, which says more."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, check=False
    )
    assert ("that no step has used" in done.stderr) == lost


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
def test_a_skip_without_a_scaler_is_said_once_with_names(window, policy):
    parameter, opt = wrapped_zeros(window, on_nonfinite=policy)

    def train():
        for _ in range(4 * window):
            opt.backward(parameter * NAN)
            opt.step()

    (said,) = warnings_of(train)
    assert "a window was skipped, for inf or NaN in the gradient of weight." in str(said.message)
    assert said.filename == __file__
    assert opt.last.skipped


def test_a_scaler_that_looks_for_its_scale_is_quiet_until_there_is_nothing_to_find():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    parameter, opt = wrapped_zeros(scaler=scaler)
    skips = []

    def train():
        for _ in range(6):
            one_call(opt, parameter * NAN)
            skips.append(scaler.get_scale())

    (said,) = warnings_of(train)
    assert "a window was skipped" in str(said.message)
    assert skips == [4.0, 2.0, 1.0, 0.5, 0.25, 0.125]

    parameter, opt = wrapped_zeros()
    assert warnings_of(lambda: outer_scaler(opt, parameter * NAN, growing_scaler())) == []


def test_a_warning_that_is_an_error_leaves_the_window_closed():
    parameter, opt = wrapped_zeros()
    opt.backward(parameter * NAN)
    with warnings_as("error"), pytest.raises(UserWarning, match="a window was skipped"):
        opt.step()
    assert opt.last.skipped
    one_call(opt, parameter * 2)
    assert parameter.item() == -2.0


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
def test_steps_without_a_gradient_are_said_once(loop, window):
    model, calls = make_model(), max(window, 2)
    opt = wrapped(model, window=window)

    def train(batches):
        for batch in batches:
            loop(model, opt, batch)

    assert warnings_of(lambda: train(make_batches(calls - 1))) == []
    said_once(lambda: train(make_batches(2 * calls)), f"{calls} calls of step found no gradient")


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_without_gradients_for_a_while_say_nothing(frozen):
    """All are frozen, or one micro-batch in two reaches them."""
    parameter, opt = wrapped_zeros(2)
    parameter.requires_grad_(not frozen)

    def train():
        for i in range(8):
            if i % 2 and not frozen:
                opt.backward(parameter * 1)
            opt.step()

    assert warnings_of(train) == []


def by_both(loss, first, second):
    loss.backward()
    first.step()
    second.step()


def by_one_and_the_other(loss, first, second):
    first.backward(loss)
    second.step()
    first.step()


@pytest.mark.parametrize("loop", [by_both, by_one_and_the_other])
def test_a_second_wrapper_of_the_same_parameters_is_said_once(loop):
    parameter, first = wrapped_zeros(3)
    second = AccumulatingOptimizer(sgd([parameter]), window=3)

    def train():
        for _ in range(9):
            loop(parameter * 1, first, second)

    said_once(train, "Another AccumulatingOptimizer has taken gradients of them: use one")


def test_two_wrappers_with_losses_of_their_own_say_nothing():
    parameter, first = wrapped_zeros(3)
    second = AccumulatingOptimizer(sgd([parameter]), window=2)

    def train():
        for _ in range(12):
            one_call(first, parameter * 1)
            one_call(second, parameter * 2)

    assert warnings_of(train) == []
    assert parameter.item() == -4 * 1 - 6 * 2


def test_a_loss_beside_those_that_are_scaled_is_said_once():
    parameter, opt = wrapped_zeros(2, scaler=torch.amp.GradScaler("cpu"))

    def train():
        for _ in range(4):
            one_call(opt, parameter * 1)
            own_backward(opt, parameter * 1)

    said_once(train, "opt.backward(loss) for every loss, or scaler.scale(loss).backward()")


# Work that is done twice


@pytest.mark.parametrize("divide", [lambda x, n: x / n, lambda x, n: x * (1 / n)], ids="/*")
def test_a_loss_that_is_divided_by_the_window_is_said_once(divide):
    model = make_model()
    opt = wrapped(model, window=4)

    def train():
        for batch in make_batches(16):
            one_call(opt, divide(loss_of(model, batch), 4))

    said_once(train, "Pass the loss itself: opt.backward(loss)")


QUOTIENTS = {
    "by-another": lambda model, x: loss_of(model, x) / 3,
    "of-two-losses": lambda model, x: (loss_of(model, x) + loss_of(model, -x)) / 2,
    "of-a-sum": lambda model, x: model(x).square().sum() / 2,
    "of-a-summed-loss": lambda model, x: (
        functional.mse_loss(model(x), -x[:, :2], reduction="sum") / 2
    ),
    "half": lambda model, x: 0.5 * loss_of(model, x),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_other_quotients_say_nothing(name):
    model = make_model()
    opt = wrapped(model, window=2)

    def train():
        for batch in make_batches(8):
            one_call(opt, QUOTIENTS[name](model, batch))

    assert warnings_of(train) == []


def test_a_division_that_nothing_repeats_says_nothing():
    """Parts of a micro-batch, and `reduction="sum"`."""
    model = make_model()
    opt, summing = wrapped(model, window=2), wrapped(model, window=2, reduction="sum")

    def train():
        for batch in make_batches(8):
            with opt.micro_batch():
                for part in (batch[:2], batch[2:]):
                    opt.backward(loss_of(model, part) / 2)
            opt.step()
            one_call(summing, loss_of(model, batch) / 2)

    assert warnings_of(train) == []


# Windows that are not what they seem


def token_by_token(model, opt):
    """As `tbptt(backward=opt.backward)` does."""
    for batch in make_batches(2):
        for row in batch:
            opt.backward(loss_of(model, row))
        opt.step()


def never_stepped(model, opt):
    for batch in make_batches(9):
        opt.backward(loss_of(model, batch))
    opt.flush()


def accumulated_alone(model, opt):
    for batch in make_batches(9):
        loss_of(model, batch).backward()
        opt.accumulate()
    opt.step()


def stepped_by_hand(model, opt):
    for batch in make_batches(9):
        opt.backward(loss_of(model, batch))
        opt.optimizer.step()
    opt.discard()


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(
    "loop", [token_by_token, never_stepped, accumulated_alone, stepped_by_hand]
)
def test_more_micro_batches_than_a_window_are_said_once(loop, window):
    model = make_model()
    opt = wrapped(model, window=window)
    said_once(lambda: loop(model, opt), f"comes into a window of {window} that is full")


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_rate_that_changes_inside_a_window_is_said_once(rate):
    model = make_model()

    def train(whenever):
        opt = wrapped(model, partial(torch.optim.Adam, lr=rate), window=4)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for batch in make_batches(12):
            one_call(opt, loss_of(model, batch))
            if whenever or opt.stepped:
                schedule.step()

    assert warnings_of(lambda: train(False)) == []
    said_once(lambda: train(True), "if opt.stepped: schedule.step()")


def test_a_clip_of_what_lies_in_the_window_is_said_once():
    model = make_model()
    opt = wrapped(model, window=4)

    def train():
        for batch in make_batches(8):
            opt.backward(loss_of(model, batch))
            accumext.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()

    said_once(train, "pass max_norm to the optimizer")
    assert warnings_of(lambda: accumext.clip_grad_norm_(model.parameters(), 0.1)) == []


# Costs of watching


@pytest.mark.parametrize("loop", [one_call, own_backward, outer_scaler])
@pytest.mark.parametrize("window", [1, 2])
def test_nothing_is_watched_after_two_windows(loop, window):
    model = make_model()
    opt = wrapped(model, window=window)
    for batch in make_batches(2 * window):
        assert opt._box.watch is not None
        run(opt, model, [batch], loop, None, growing_scaler())
    assert opt._box.watch is None


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
