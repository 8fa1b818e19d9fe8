"""The training loops of AccumulatingOptimizer give one result: the window's gradient by hand."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    OP,
    OPTIMIZERS,
    adam,
    assert_close,
    assert_equal,
    growing_scaler,
    loss_of,
    make_batches,
    make_model,
    says,
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
    actual = train(
        loop, window, outer=growing_scaler(), max_norm=max_norm, on_nonfinite=on_nonfinite
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("loop", WEIGHTED_LOOPS)
def test_own_scaler_equals_oracle(loop, window, max_norm):
    expected = train_by_hand(adam, BATCHES, window, max_norm=max_norm)
    assert_close(train(loop, window, own=growing_scaler(), max_norm=max_norm), expected)


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
    bare(loop, reference, OPTIMIZERS[kind](reference.parameters()), SINGLE, growing_scaler())
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(OPTIMIZERS[kind](model.parameters()), on_nonfinite=on_nonfinite)
    BITWISE_LOOPS[loop](model, opt, SINGLE, growing_scaler())
    assert_equal(
        [p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()]
    )


def test_main_grad_wants_a_parameter_of_the_optimizer(halfway):
    text = f"{OP}.main_grad: parameter must be a parameter of this optimizer"
    with pytest.raises(ValueError, match=says(text)):
        halfway[1].main_grad(torch.zeros(4, 3))


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
