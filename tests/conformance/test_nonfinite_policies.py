"""What an inf or NaN does to a window: skipped whole, dropped alone, or raised."""

from __future__ import annotations

import pytest
import torch
from optimizer_oracle import (
    INF,
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    train_by_hand,
)

from accumext.optimizer import AccumulatingOptimizer

NAN = float("nan")
BATCHES = make_batches(6)
SCALE = 1024.0
PROTOCOLS = ["none", "own", "outer", "outer-unscaled"]


def adam(parameters, **kwargs):
    return torch.optim.Adam(parameters, lr=0.05, **kwargs)


def poisoned_loss(model, batch, value):
    """A loss whose gradient is not finite for the first weight alone."""
    return loss_of(model, batch) + model[0].weight[0, 0] * value


def train(protocol, bad, value=INF, *, batches=BATCHES, fused=False, model=None, **kwargs):
    """Two windows of 3 micro-batches; those in `bad` have a gradient of `value`."""
    model = make_model() if model is None else model
    scaler = None
    if protocol != "none":
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    own = scaler if protocol == "own" else None
    opt = AccumulatingOptimizer(
        adam(model.parameters(), fused=fused), window=3, scaler=own, **kwargs
    )
    reports = []
    for i, batch in enumerate(batches):
        loss = poisoned_loss(model, batch, value) if i in bad else loss_of(model, batch)
        if protocol in ("none", "own"):
            opt.backward(loss)
            opt.step()
        else:
            scaler.scale(loss).backward()
            if protocol == "outer-unscaled":
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        if opt.stepped:
            reports.append(opt.last)
    return [p.detach() for p in model.parameters()], reports, scaler


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_skip_window(protocol, bad, value, fused):
    actual, (first, second), scaler = train(protocol, {bad}, value, fused=fused)
    assert_close(actual, train_by_hand(adam, BATCHES[3:], 3))
    assert (first.skipped, second.skipped) == (True, False)
    assert (first.nonfinite, second.nonfinite) == ([0], [])
    if scaler is not None:
        assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {0, 2}], ids=str)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_skip_micro_batch(protocol, bad, max_norm):
    actual, (first, second), scaler = train(
        protocol, bad, max_norm=max_norm, on_nonfinite="skip_micro_batch"
    )
    good = [batch for i, batch in enumerate(BATCHES[:3]) if i not in bad]
    model = make_model()
    expected = AccumulatingOptimizer(adam(model.parameters()), window=len(good), max_norm=max_norm)
    for some in (good, BATCHES[3:]):
        for batch in some:
            expected.backward(loss_of(model, batch))
        expected.flush()
    assert_close(actual, [p.detach() for p in model.parameters()])
    assert not first.skipped
    assert first.nonfinite == [0]
    assert (first.micro_batches, first.weight.item()) == (len(good), len(good))
    assert second.nonfinite == []
    if scaler is not None:
        assert scaler.get_scale() == SCALE / 2 ** (1 if protocol == "own" else len(bad))


@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [3.0, 5.0, 7.0]], ids=["equal", "unequal"])
def test_the_sum_of_the_good_ones_is_theirs_bit_for_bit(bad, weights):
    def sums(skip_bad):
        model = make_model(torch.float32)
        opt = AccumulatingOptimizer(
            adam(model.parameters()), window=4, on_nonfinite="skip_micro_batch"
        )
        for i, (batch, weight) in enumerate(zip(make_batches(3, torch.float32), weights)):
            if i == bad and skip_bad:
                continue
            poison = poisoned_loss(model, batch, NAN)
            opt.backward(poison if i == bad else loss_of(model, batch), weight)
        return [opt.main_grad(p) for p in model.parameters()]

    assert_equal(sums(skip_bad=False), sums(skip_bad=True))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_window_without_survivors_is_skipped(protocol):
    actual, (first, second), _ = train(protocol, {0, 1, 2}, on_nonfinite="skip_micro_batch")
    assert_close(actual, train_by_hand(adam, BATCHES[3:], 3))
    assert (first.skipped, second.skipped) == (True, False)
    assert first.micro_batches == 0


def test_window_of_one_skips_the_micro_batch():
    for policy in ("skip_window", "skip_micro_batch"):
        model = make_model()
        opt = AccumulatingOptimizer(adam(model.parameters()), on_nonfinite=policy)
        for i, batch in enumerate(BATCHES[:3]):
            opt.backward(poisoned_loss(model, batch, INF) if i == 1 else loss_of(model, batch))
            opt.step()
        expected = train_by_hand(adam, [BATCHES[0], BATCHES[2]], 1)
        assert_close([p.detach() for p in model.parameters()], expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_raise_leaves_everything_as_it_was(protocol):
    model = make_model()
    scaler = None
    if protocol != "none":
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    named = adam(model.named_parameters())
    opt = AccumulatingOptimizer(
        named, window=3, on_nonfinite="raise", scaler=scaler if protocol == "own" else None
    )

    def run(loss):
        if protocol in ("none", "own"):
            opt.backward(loss)
            opt.step()
            return
        scaler.scale(loss).backward()
        if protocol == "outer-unscaled":
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    run(loss_of(model, BATCHES[0]))
    before = opt.accumulation_state_dict()
    with pytest.raises(
        RuntimeError, match=r"gradients must be finite, got inf or NaN in 0\.weight$"
    ):
        run(poisoned_loss(model, BATCHES[1], INF))
    after = opt.accumulation_state_dict()
    assert_equal(list(after.pop("main_grads").values()), list(before.pop("main_grads").values()))
    assert str(after) == str(before)
    assert not named.state
    if protocol.startswith("outer"):
        scaler.update()  # what the user does who catches the error: the record holds the inf
        opt.zero_grad()
        assert scaler.get_scale() == SCALE / 2
    run(loss_of(model, BATCHES[1]))
    run(loss_of(model, BATCHES[2]))
    assert_close([p.detach() for p in model.parameters()], train_by_hand(adam, BATCHES[:3], 3))


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_names_where_the_optimizer_has_names(max_norm):
    model = make_model()
    opt = AccumulatingOptimizer(adam(model.named_parameters()), window=2, max_norm=max_norm)
    opt.backward(loss_of(model, BATCHES[0]))
    opt.backward(loss_of(model, BATCHES[1]) + (model[2].bias * INF).sum())
    opt.step()
    assert opt.last.nonfinite == ["2.bias"]
    assert opt.stats()["skipped"] == 1.0


def test_own_scaler_is_updated_once_per_window():
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)
    opt = AccumulatingOptimizer(adam(model.parameters()), window=3, scaler=scaler)
    scales = []
    for batch in BATCHES:
        opt.backward(loss_of(model, batch))
        opt.step()
        scales.append(scaler.get_scale() / SCALE)
    assert scales == [1.0, 1.0, 2.0, 2.0, 2.0, 4.0]


def test_a_found_inf_that_was_summed_over_devices_skips_too():
    """GradScaler adds the flags of devices up, and fused kernels skip for exactly 1.0."""
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(adam(model.parameters(), fused=True))
    loss_of(model, make_batches(1, torch.float32)[0]).backward()
    opt.grad_scale, opt.found_inf = None, torch.tensor(2.0)
    opt.step()
    assert opt.last.skipped
    assert opt.stats()["skipped"] == 1.0


def test_a_norm_that_overflows_skips_instead_of_clipping_to_zero():
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(adam(model.parameters()), max_norm=1.0)
    opt.backward((model[0].weight * 1e30).sum())
    opt.step()
    assert opt.last.skipped
    assert not opt.optimizer.state
