"""The training loops of AccumulatingOptimizer give one result: the window's gradient by hand."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    OPTIMIZERS,
    accumulated,
    adam,
    assert_close,
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
    parameters_of,
    run,
    sgd,
    train_by_hand,
    windows_of,
    wrapped,
)

BATCHES = make_batches(12)
WEIGHTS = [3.0, 1.0, 7.0, 2.0, 2.0, 5.0, 1.0, 1.0, 4.0, 9.0, 0.0, 6.0]


def own_accumulation(opt, model, batches, outer):
    """Two passes into `.grad`, then `scaler.step` once."""
    for several in windows_of(batches, 2):
        for batch in several[:-1]:
            outer.scale(loss_of(model, batch)).backward()
        outer_scaler(opt, loss_of(model, several[-1]), outer)


WEIGHTED_LOOPS = [one_call, accumulated, in_parts]
LOOPS = [*WEIGHTED_LOOPS, own_backward, outer_scaler, outer_scaler_unscaled]
POLICIES = pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])


@POLICIES
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("window", [1, 4, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_equals_oracle(loop, window, max_norm, on_nonfinite):
    model = make_model()
    options = {"window": window, "max_norm": max_norm, "on_nonfinite": on_nonfinite}
    opt = wrapped(model, adam, **options)
    weights = WEIGHTS if loop in WEIGHTED_LOOPS else None
    run(opt, model, BATCHES, loop, weights, growing_scaler())
    opt.flush()  # of five, the last window is partial: it is divided by what it holds
    expected = train_by_hand(adam, BATCHES, window, weights=weights, max_norm=max_norm)
    assert_close(parameters_of(model), expected)


# Bit for bit the bare optimizer

SINGLE = make_batches(20, torch.float32)
WEIGHED = [[1.0] * 20, [3.0, 49.0] * 10, [torch.tensor(49)] * 20]  # which change no bit
BITWISE = [
    *((one_call, own_backward, weights) for weights in WEIGHED),
    *((loop, loop, None) for loop in (own_backward, outer_scaler, outer_scaler_unscaled)),
    (own_accumulation, own_accumulation, None),
]


@POLICIES
@pytest.mark.parametrize(("loop", "bare", "weights"), BITWISE)
@pytest.mark.parametrize("kind", ["sgd-momentum", "adamw-foreach", "adamw-fused"])
def test_window_of_one_is_the_bare_optimizer(kind, loop, bare, weights, on_nonfinite):
    reference, model = make_model(torch.float32), make_model(torch.float32)
    optimizer = OPTIMIZERS[kind](reference.parameters())
    opt = wrapped(model, OPTIMIZERS[kind], on_nonfinite=on_nonfinite)
    if loop is own_accumulation:
        loop(optimizer, reference, SINGLE, growing_scaler())
        loop(opt, model, SINGLE, growing_scaler())
    else:
        run(optimizer, reference, SINGLE, bare, scaler=growing_scaler())
        run(opt, model, SINGLE, loop, weights, growing_scaler())
    assert_equal(parameters_of(model), parameters_of(reference))


def test_it_prints_its_settings_its_scaler_and_how_full_the_window_is():
    model, scaler = make_model(), torch.amp.GradScaler("cpu")
    opt = wrapped(model, window=4, scaler=scaler, accumulate_in_backward=True)
    for _ in range(2):
        opt.backward(loss_of(model, BATCHES[0]))
    settings = "window=4, max_norm=None, norm_type=2.0, scaler=GradScaler(), "
    settings += "on_nonfinite='skip_window', reduction='mean', accumulate_in_backward=True"
    expected = f"AccumulatingOptimizer({opt.optimizer!r}, {settings}, 2/4 micro-batches)"
    assert repr(opt) == expected
    opt.discard()
    bare = repr(wrapped(model, sgd))
    assert "scaler=None" in bare
    assert bare.endswith("reduction='mean', 0/1 micro-batches)")
    assert opt.stats() == {}
