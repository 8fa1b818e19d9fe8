"""The training loops of AccumulatingOptimizer give one result: the window's gradient by hand."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    OPTIMIZERS,
    adam,
    assert_close,
    assert_equal,
    growing_scaler,
    loss_of,
    make_batches,
    make_model,
    parameters_of,
    train_by_hand,
    windows_of,
)

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(12)
WEIGHTS = [3.0, 1.0, 7.0, 2.0, 2.0, 5.0, 1.0, 1.0, 4.0, 9.0, 0.0, 6.0]


def one_call(model, opt, batches, weights, outer):
    for batch, weight in zip(batches, weights):
        opt.backward(loss_of(model, batch), weight)
        opt.step()


def accumulated(model, opt, batches, weights, outer):
    for batch, weight in zip(batches, weights):
        loss = loss_of(model, batch)
        (loss if opt.scaler is None else opt.scaler.scale(loss)).backward()
        opt.accumulate(weight)
        opt.step()


def plain(model, opt, batches, weights, outer):
    for batch in batches:
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()


def outer_scaler(model, opt, batches, weights, outer, passes=1, unscales=False):
    for several in windows_of(batches, passes):
        for batch in several:
            outer.scale(loss_of(model, batch)).backward()
        if unscales:
            outer.unscale_(opt)
        outer.step(opt)
        outer.update()
        opt.zero_grad()


def outer_scaler_unscaled(*arguments):
    outer_scaler(*arguments, unscales=True)


def own_accumulation(*arguments):
    outer_scaler(*arguments, passes=2)


def several_backwards(model, opt, batches, weights, outer):
    for batch, weight in zip(batches, weights):
        with opt.micro_batch():
            loss = loss_of(model, batch)
            opt.backward(0.25 * loss, weight)
            opt.backward(0.75 * loss_of(model, batch), weight)
        opt.step()


LOOPS = [one_call, plain, accumulated, outer_scaler, outer_scaler_unscaled, several_backwards]
WEIGHTED_LOOPS = [one_call, accumulated, several_backwards]


def train(loop, window, batches=BATCHES, weights=None, own=None, outer=None, flush=True, **kwargs):
    model = make_model(batches[0].dtype)
    opt = AccumulatingOptimizer(adam(model.parameters()), window=window, scaler=own, **kwargs)
    loop(model, opt, batches, [1.0] * len(batches) if weights is None else weights, outer)
    if flush:
        opt.flush()
    return parameters_of(model)


@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("window", [1, 4, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_equals_oracle(loop, window, max_norm, on_nonfinite):
    expected = train_by_hand(adam, BATCHES, window, max_norm=max_norm)
    actual = train(
        loop, window, outer=growing_scaler(), max_norm=max_norm, on_nonfinite=on_nonfinite
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("own", [False, True], ids=["no-scaler", "own-scaler"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("window", [1, 4, 5])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("loop", WEIGHTED_LOOPS)
def test_weights_equal_oracle(loop, on_nonfinite, window, reduction, own, as_tensor):
    expected = train_by_hand(adam, BATCHES, window, weights=WEIGHTS, reduction=reduction)
    weights = [torch.tensor(w, dtype=torch.float64) for w in WEIGHTS] if as_tensor else WEIGHTS
    actual = train(
        loop,
        window,
        weights=weights,
        own=growing_scaler() if own else None,
        reduction=reduction,
        on_nonfinite=on_nonfinite,
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("first", [0.0, 3.0])
def test_zero_weights_leave_no_nan(first, as_tensor):
    weights = [first, 0.0, 0.0, 2.0 if first else 0.0]
    expected = train_by_hand(adam, BATCHES[:4], 4, weights=weights)
    given = [torch.tensor(w) for w in weights] if as_tensor else weights
    assert_close(train(one_call, 4, batches=BATCHES[:4], weights=given), expected)


def test_partial_window_is_divided_by_what_it_holds():
    expected = train_by_hand(adam, BATCHES[:6], 4)
    assert_close(train(one_call, 4, batches=BATCHES[:6]), expected)
    assert_close(train(plain, 4, batches=BATCHES[:6]), expected)


def test_flush_and_discard_on_an_empty_window_do_nothing():
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    opt = AccumulatingOptimizer(adam(model.parameters()), window=2)
    opt.flush()
    opt.backward(loss_of(model, BATCHES[0]))
    opt.discard()
    opt.flush()
    opt.discard()
    assert not opt.stepped
    assert opt.last is None
    assert opt.stats() == {}
    assert_equal(parameters_of(model), before)


# Bit for bit the bare optimizer

SINGLE = make_batches(20, torch.float32)
WEIGHED = [[1.0] * 20, [3.0, 49.0] * 10, [torch.tensor(49)] * 20]  # which change no bit
BITWISE = [
    *((one_call, plain, weights) for weights in WEIGHED),
    *((loop, loop, None) for loop in (plain, outer_scaler, outer_scaler_unscaled)),
    (own_accumulation, own_accumulation, None),
]


@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize(("loop", "bare", "weights"), BITWISE)
@pytest.mark.parametrize("kind", ["sgd-momentum", "adamw-foreach", "adamw-fused"])
def test_window_of_one_is_the_bare_optimizer(kind, loop, bare, weights, on_nonfinite):
    reference, model = make_model(torch.float32), make_model(torch.float32)
    bare(reference, OPTIMIZERS[kind](reference.parameters()), SINGLE, None, growing_scaler())
    opt = AccumulatingOptimizer(OPTIMIZERS[kind](model.parameters()), on_nonfinite=on_nonfinite)
    loop(model, opt, SINGLE, weights, growing_scaler())
    assert_equal(parameters_of(model), parameters_of(reference))


def test_it_prints_its_settings_its_scaler_and_how_full_the_window_is():
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = AccumulatingOptimizer(
        inner, window=4, scaler=torch.amp.GradScaler("cpu"), accumulate_in_backward=True
    )
    for _ in range(2):
        opt.backward(loss_of(model, BATCHES[0]))
    settings = "window=4, max_norm=None, norm_type=2.0, scaler=GradScaler(), "
    settings += "on_nonfinite='skip_window', reduction='mean', accumulate_in_backward=True"
    assert repr(opt) == f"AccumulatingOptimizer({inner!r}, {settings}, 2/4 micro-batches)"
    opt.discard()
    bare = repr(AccumulatingOptimizer(inner))
    assert "scaler=None" in bare
    assert bare.endswith("reduction='mean', 0/1 micro-batches)")
