"""The training loops of AccumulatingOptimizer give one result: the window's gradient by hand."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    adam,
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    train_by_hand,
    windows_of,
)
from torch import Tensor

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(12)
WEIGHTS = [3.0, 1.0, 7.0, 2.0, 2.0, 5.0, 1.0, 1.0, 4.0, 9.0, 0.0, 6.0]


def scaler(**kwargs):
    """A CPU scaler that grows every few updates, so that the scale changes inside windows."""
    settings = {"init_scale": 1024.0, "growth_interval": 2, **kwargs}
    return torch.amp.GradScaler("cpu", **settings)


def one_call(model, opt, batches, weights, outer):
    for batch, weight in zip(batches, weights):
        opt.backward(loss_of(model, batch), weight)
        opt.step()


def plain(model, opt, batches, weights, outer):
    for batch in batches:
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()


def accumulated(model, opt, batches, weights, outer):
    for batch, weight in zip(batches, weights):
        loss = loss_of(model, batch)
        (loss if opt.scaler is None else opt.scaler.scale(loss)).backward()
        opt.accumulate(weight)
        opt.step()


def outer_scaler(model, opt, batches, weights, outer):
    for batch in batches:
        outer.scale(loss_of(model, batch)).backward()
        outer.step(opt)
        outer.update()
        opt.zero_grad()


def outer_scaler_unscaled(model, opt, batches, weights, outer):
    for batch in batches:
        outer.scale(loss_of(model, batch)).backward()
        outer.unscale_(opt)
        outer.step(opt)
        outer.update()
        opt.zero_grad()


def several_backwards(model, opt, batches, weights, outer):
    for batch, weight in zip(batches, weights):
        with opt.micro_batch():
            loss = loss_of(model, batch)
            opt.backward(0.25 * loss, weight)
            opt.backward(0.75 * loss_of(model, batch), weight)
        opt.step()


SCALED_LOOPS = [outer_scaler, outer_scaler_unscaled]
LOOPS = [one_call, plain, accumulated, *SCALED_LOOPS, several_backwards]
WEIGHTED_LOOPS = [one_call, accumulated, several_backwards]


def train(loop, window, batches=BATCHES, weights=None, own=None, outer=None, flush=True, **kwargs):
    model = make_model(batches[0].dtype)
    opt = AccumulatingOptimizer(adam(model.parameters()), window=window, scaler=own, **kwargs)
    loop(model, opt, batches, [1.0] * len(batches) if weights is None else weights, outer)
    if flush:
        opt.flush()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("window", [1, 4, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_equals_oracle(loop, window, max_norm, on_nonfinite):
    expected = train_by_hand(adam, BATCHES, window, max_norm=max_norm)
    actual = train(loop, window, outer=scaler(), max_norm=max_norm, on_nonfinite=on_nonfinite)
    assert_close(actual, expected)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("loop", WEIGHTED_LOOPS)
def test_own_scaler_equals_oracle(loop, window, max_norm):
    expected = train_by_hand(adam, BATCHES, window, max_norm=max_norm)
    assert_close(train(loop, window, own=scaler(), max_norm=max_norm), expected)


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
        own=scaler() if own else None,
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


def test_a_weight_of_zero_is_not_looked_at():
    """The mean over no tokens is NaN; what counts nothing must not spoil the window."""
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()), window=3)
    for batch, weight in zip([BATCHES[0], BATCHES[1] * float("nan"), BATCHES[2]], [2.0, 0.0, 1.0]):
        opt.backward(loss_of(model, batch), weight)
        opt.step()
    expected = train_by_hand(adam, [BATCHES[0], BATCHES[2]], 2, weights=[2.0, 1.0])
    assert not opt.last.skipped
    assert_close([p.detach() for p in model.parameters()], expected)


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch", "raise"])
def test_the_report_keeps_the_loss_scale_of_a_window_that_left_grad(policy, weight):
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = AccumulatingOptimizer(adam(model.parameters()), scaler=scaler, on_nonfinite=policy)
    opt.backward(loss_of(model, BATCHES[0]), weight)
    opt.zero_grad()
    opt.flush()
    assert (opt.last.loss_scale, opt.last.weight) == (4.0, weight)


def test_partial_window_is_divided_by_what_it_holds():
    expected = train_by_hand(adam, BATCHES[:6], 4)
    assert_close(train(one_call, 4, batches=BATCHES[:6]), expected)
    assert_close(train(plain, 4, batches=BATCHES[:6]), expected)


def test_ways_of_taking_in_may_be_mixed():
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()), window=5, max_norm=0.1)
    for i, batch in enumerate(BATCHES[:5]):
        if i in (1, 3):
            loss_of(model, batch).backward()
            opt.accumulate(WEIGHTS[i])
        else:
            opt.backward(loss_of(model, batch), WEIGHTS[i])
        opt.step()
    expected = train_by_hand(adam, BATCHES[:5], 5, weights=WEIGHTS[:5], max_norm=0.1)
    assert_close([p.detach() for p in model.parameters()], expected)


def test_more_micro_batches_than_the_window_are_all_averaged():
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()), window=1)
    for batch in BATCHES[:3]:
        opt.backward(loss_of(model, batch))
    opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(adam, BATCHES[:3], 3))


def test_stray_zero_grad_does_no_harm():
    def loop(model, opt, batches, weights, outer):
        for batch in batches:
            opt.zero_grad()
            opt.backward(loss_of(model, batch))
            opt.zero_grad()
            opt.step()
            opt.zero_grad(set_to_none=False)

    for window in (1, 4):
        assert_close(train(loop, window), train_by_hand(adam, BATCHES, window))


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
    assert_equal([p.detach() for p in model.parameters()], before)


@pytest.mark.parametrize("again", ["step", "flush"])
def test_a_gradient_is_not_used_twice(again):
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()))
    opt.backward(loss_of(model, BATCHES[0]))
    opt.step()
    assert opt.stepped
    getattr(opt, again)()
    assert not opt.stepped
    assert_close([p.detach() for p in model.parameters()], train_by_hand(adam, BATCHES[:1], 1))


def test_zeros_left_by_zero_grad_are_no_micro_batch():
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.parameters()))
    opt.backward(loss_of(model, BATCHES[0]))
    opt.step()
    opt.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    opt.flush()
    assert not opt.stepped


def test_without_zero_grad_a_window_of_one_adds_up_like_the_bare_optimizer():
    reference, model = make_model(), make_model()
    bare, opt = adam(reference.parameters()), AccumulatingOptimizer(adam(model.parameters()))
    for batch in BATCHES[:3]:
        loss_of(reference, batch).backward()
        bare.step()
        loss_of(model, batch).backward()
        opt.step()
    assert_equal(
        [p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()]
    )


# Bit for bit the bare optimizer

OPTIMIZERS = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, **kw),
    "sgd-momentum": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=0.05, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.05, **kw),
    "adamw-foreach": lambda p, **kw: torch.optim.AdamW(p, lr=0.05, foreach=True, **kw),
    "adamw-fused": lambda p, **kw: torch.optim.AdamW(p, lr=0.05, fused=True, **kw),
    "sgd-fused": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True, **kw),
    "rmsprop": lambda p, **kw: torch.optim.RMSprop(p, lr=0.01, **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.1, **kw),
}
SINGLE = make_batches(20, torch.float32)


def own_accumulation(model, opt, batches, outer):
    for pair in windows_of(batches, 2):
        for batch in pair:
            outer.scale(loss_of(model, batch)).backward()
        outer.step(opt)
        outer.update()
        opt.zero_grad()


BITWISE_LOOPS = {
    "1": lambda m, o, b, s: one_call(m, o, b, [1.0] * len(b), s),
    "1-weighted": lambda m, o, b, s: one_call(m, o, b, [3.0, 49.0] * len(b), s),
    "1-tensor-weights": lambda m, o, b, s: one_call(m, o, b, [torch.tensor(49)] * len(b), s),
    "2": lambda m, o, b, s: plain(m, o, b, None, s),
    "3": lambda m, o, b, s: outer_scaler(m, o, b, None, s),
    "3-unscaled": lambda m, o, b, s: outer_scaler_unscaled(m, o, b, None, s),
    "4": own_accumulation,
}


def bare(loop: str, model, opt, batches, outer) -> None:
    """The loop that a user of the bare optimizer writes."""
    if loop == "4":
        own_accumulation(model, opt, batches, outer)
    elif loop.startswith("3"):
        (outer_scaler if loop == "3" else outer_scaler_unscaled)(model, opt, batches, None, outer)
    else:
        plain(model, opt, batches, None, outer)


@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch", "raise"])
@pytest.mark.parametrize("loop", BITWISE_LOOPS)
@pytest.mark.parametrize("kind", ["sgd-momentum", "adamw-foreach", "adamw-fused"])
def test_window_of_one_is_the_bare_optimizer(kind, loop, on_nonfinite):
    reference = make_model(torch.float32)
    bare(loop, reference, OPTIMIZERS[kind](reference.parameters()), SINGLE, scaler())
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(OPTIMIZERS[kind](model.parameters()), on_nonfinite=on_nonfinite)
    BITWISE_LOOPS[loop](model, opt, SINGLE, scaler())
    assert_equal(
        [p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()]
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("window", [1, 4])
def test_every_optimizer_clips_alike(kind, window):
    # One division more or less per gradient, in float32, over 20 steps of at most 0.1 each.
    tolerance = 1e-5
    expected = train_by_hand(OPTIMIZERS[kind], SINGLE, window, max_norm=0.05, dtype=torch.float32)
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(OPTIMIZERS[kind](model.parameters()), window=window, max_norm=0.05)
    clipped = False
    for batch in SINGLE:
        opt.backward(loss_of(model, batch))
        opt.step()
        clipped |= opt.stepped and bool(opt.last.clip_coef < 1.0)
    assert clipped
    assert_close([p.detach() for p in model.parameters()], expected, tolerance)


@pytest.mark.parametrize("window", [1, 4])
def test_a_fused_optimizer_loses_no_float64(window):
    """Its `grad_scale` is float32; afterwards it must be as no GradScaler had been there."""
    expected = train_by_hand(OPTIMIZERS["adamw-fused"], BATCHES, window, max_norm=0.05)
    model = make_model()
    fused = OPTIMIZERS["adamw-fused"](model.parameters())
    opt = AccumulatingOptimizer(fused, window=window, max_norm=0.05)
    one_call(model, opt, BATCHES, WEIGHTS[:1] * len(BATCHES), None)
    assert_close([p.detach() for p in model.parameters()], expected)
    assert not {"grad_scale", "found_inf"} & set(vars(fused))


@pytest.mark.parametrize("max_norm", [0.01, None])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_report_of_a_window(norm_type, max_norm):
    model = make_model()
    opt = AccumulatingOptimizer(
        adam(model.parameters()), window=2, max_norm=max_norm, norm_type=norm_type, scaler=scaler()
    )
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for batch, weight in zip(BATCHES, [3.0, 1.0]):
        for grad, new in zip(grads, torch.autograd.grad(loss_of(model, batch), model.parameters())):
            grad += weight / 4.0 * new
        opt.backward(loss_of(model, batch), weight)
        opt.step()
    flat: Tensor = torch.cat([grad.flatten() for grad in grads])
    norm = torch.linalg.vector_norm(flat, norm_type).item()
    assert opt.stepped
    assert opt.last.total_norm.item() == pytest.approx(norm, rel=1e-12)
    clip_coef = 1.0 if max_norm is None else max_norm / (norm + 1e-6)
    assert opt.last.clip_coef.item() == pytest.approx(clip_coef, rel=1e-12)
    assert (opt.last.weight, opt.last.micro_batches, opt.last.loss_scale) == (4.0, 2, 1024.0)
    assert not opt.last.skipped
    assert opt.last.nonfinite == []
    assert opt.stats() == {
        "total_norm": opt.last.total_norm.item(),
        "clip_coef": opt.last.clip_coef.item(),
        "loss_scale": 1024.0,
        "weight": 4.0,
        "micro_batches": 2.0,
        "skipped": 0.0,
    }


def test_a_norm_whose_powers_overflow_only_while_scaled():
    """1e90 times 2^100, cubed, is beyond float64; 1e90 cubed is not."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = AccumulatingOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        max_norm=1.0,
        norm_type=3.0,
        scaler=scaler(init_scale=2.0**100),
    )
    opt.backward((1e90 * parameter).sum())
    opt.step()
    assert opt.last.total_norm.item() == pytest.approx(1e90 * 3 ** (1 / 3), rel=1e-12)
    assert parameter.detach().tolist() == pytest.approx([-(3 ** (-1 / 3))] * 3, rel=1e-12)
