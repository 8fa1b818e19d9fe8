"""Uses that train wrongly without a word: one warning each, and none of the usual loops."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.optimizer_oracle import (
    NAN,
    OP,
    accumulated,
    growing_scaler,
    in_parts,
    make_batches,
    make_model,
    one_call,
    outer_scaler,
    outer_scaler_unscaled,
    own_backward,
    run,
    wrapped,
    wrapped_zeros,
)
from support.recorded_warnings import warnings_as
from torch.nn.utils import clip_grad_norm_


def warnings_of(use):
    """What a use says."""
    with warnings_as("always") as said:
        use()
    return [w for w in said if str(w.message).startswith(OP)]


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
