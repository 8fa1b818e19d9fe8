"""Resuming."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from support.optimizer_oracle import (
    INF,
    adam,
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    parameters_of,
    run,
    through_a_file,
    train_by_hand,
)
from support.optimizer_oracle import wrapped as wrapping
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(3)


wrapped = partial(wrapping, make=adam, window=3)


@pytest.mark.parametrize("middle", [0, 1, 2])
@pytest.mark.parametrize(
    ("on_nonfinite", "bad"),
    [
        *(("skip_window", bad) for bad in (None, 3)),
        *(("skip_micro_batch", bad) for bad in (None, 3)),
        ("raise", None),
    ],
)
@pytest.mark.parametrize("scaled", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_resume_in_the_middle_of_a_window_bit_for_bit(dtype, scaled, on_nonfinite, bad, middle):
    """A run saved inside a window, also one with an inf, goes on in new objects bit for bit"""
    batches = make_batches(9, dtype)
    weights = [1.0, 1.0, 3.0]

    def build():
        model = make_model(dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) if scaled else None
        options = {"max_norm": 0.05, "scaler": scaler, "on_nonfinite": on_nonfinite}
        return model, wrapped(model, **options), scaler

    def go(model, opt, start, stop):
        reports = []
        for i in range(start, stop):
            loss = loss_of(model, batches[i]) * (INF if i == bad else 1.0)
            opt.backward(loss, weights[i % 3])
            opt.step()
            reports += [str(opt.stats())] if opt.stepped else []  # NaN is equal to NaN in words
        return reports

    model, opt, scaler = build()
    go(model, opt, 0, 3 + middle)
    saved = {
        "model": model.state_dict(),
        "opt": opt.state_dict(),
        "open": opt.accumulation_state_dict(),
        "scaler": scaler.state_dict() if scaled else None,
    }
    loaded = through_a_file(saved)
    reports = go(model, opt, 3 + middle, 9)

    other, resumed, other_scaler = build()
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["opt"])
    if scaled:
        other_scaler.load_state_dict(loaded["scaler"])
    resumed.load_accumulation_state_dict(loaded["open"])
    assert go(other, resumed, 3 + middle, 9) == reports
    assert_equal(parameters_of(other), parameters_of(model))
    assert len(reports) == 2


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_resumed_window_is_added_to_in_place_too(in_backward):
    """A resumed window goes on by the same route, so memory and the order of sums are the same"""
    parameter = nn.Parameter(torch.zeros(2))

    def build():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        sgd = torch.optim.SGD([parameter])
        return AccumulatingOptimizer(
            sgd, window=3, scaler=scaler, accumulate_in_backward=in_backward
        )

    opt, resumed = build(), build()
    opt.backward(parameter.sum())
    resumed.load_accumulation_state_dict(opt.accumulation_state_dict())
    address = resumed._box.state.window.sums[0].data_ptr()
    seen = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    resumed.backward(parameter.sum())
    assert seen == [address]
    assert resumed._box.state.window.sums[0].data_ptr() == address


def test_a_saved_window_is_a_copy():
    """A saved window can be loaded again after the run has gone on"""
    model = make_model()
    opt = wrapped(model)
    run(opt, model, BATCHES[:1])
    saved = opt.accumulation_state_dict()
    before = copy.deepcopy(saved["main_grads"])
    run(opt, model, BATCHES[1:2])
    opt.load_accumulation_state_dict(saved)
    run(opt, model, BATCHES[1:3])
    assert_equal(list(saved["main_grads"].values()), list(before.values()))
    assert_close(parameters_of(model), train_by_hand(adam, BATCHES[:3], 3))
