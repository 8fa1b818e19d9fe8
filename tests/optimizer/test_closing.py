"""A window is closed: norm, clip, and the gradient that the wrapped optimizer steps on."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    OPTIMIZERS,
    assert_close,
    assert_equal,
    growing_scaler,
    loss_of,
    make_batches,
    make_model,
    parameters_of,
    sgd,
    train_by_hand,
)
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(12)
SINGLE = make_batches(20, torch.float32)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("window", [1, 4])
def test_every_optimizer_clips_alike(kind, window):
    # One division more or less per gradient, in float32, over 20 steps of at most 0.1 each.
    tolerance = 1e-5
    expected = train_by_hand(OPTIMIZERS[kind], SINGLE, window, max_norm=0.05, dtype=torch.float32)
    model = make_model(torch.float32)
    opt = AccumulatingOptimizer(OPTIMIZERS[kind](model.parameters()), window=window, max_norm=0.05)
    clipped = []
    for batch in SINGLE:
        opt.backward(loss_of(model, batch))
        opt.step()
        clipped.append(opt.stepped and bool(opt.last.clip_coef < 1.0))
    assert any(clipped)
    assert_close(parameters_of(model), expected, tolerance)


@pytest.mark.parametrize("window", [1, 4])
def test_a_fused_optimizer_loses_no_float64(window):
    """Its `grad_scale` is float32; afterwards it must be as no GradScaler had been there."""
    expected = train_by_hand(OPTIMIZERS["adamw-fused"], BATCHES, window, max_norm=0.05)
    model = make_model()
    fused = OPTIMIZERS["adamw-fused"](model.parameters())
    opt = AccumulatingOptimizer(fused, window=window, max_norm=0.05)
    for batch in BATCHES:
        opt.backward(loss_of(model, batch), 3.0)
        opt.step()
    assert_close(parameters_of(model), expected)
    assert not {"grad_scale", "found_inf"} & set(vars(fused))


def test_a_norm_whose_powers_overflow_only_while_scaled():
    """1e90 times 2^100, cubed, is beyond float64; 1e90 cubed is not."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = AccumulatingOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        max_norm=1.0,
        norm_type=3.0,
        scaler=growing_scaler(init_scale=2.0**100),
    )
    opt.backward((1e90 * parameter).sum())
    opt.step()
    assert opt.last.total_norm.item() == pytest.approx(1e90 * 3 ** (1 / 3), rel=1e-12)
    assert parameter.detach().tolist() == pytest.approx([-(3 ** (-1 / 3))] * 3, rel=1e-12)


def test_the_norm_covers_parameters_that_the_last_micro_batch_left_out():
    """The last pass may know the norm already, but only of the gradients that it went over."""
    a, b = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    opt = AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), window=2, reduction="sum")
    for loss in (3 * a + 2 * b, 2 * b):
        loss.sum().backward()
        opt.accumulate()
    opt.step()
    assert opt.last.total_norm.item() == 5.0


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch"])
def test_the_norm_adds_up_in_the_order_of_the_optimizer(on_nonfinite, window):
    """Not in that in which gradients came: the last bit of the norm would depend on it."""
    values, norms = [torch.rand(3000), torch.rand(2000)], []
    for order in ((0, 1), (1, 0)):
        parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
        opt = AccumulatingOptimizer(sgd(parameters), window=window, on_nonfinite=on_nonfinite)
        for i in order:
            opt.backward((parameters[i] * values[i]).sum())
        opt.flush()
        norms.append(opt.last.total_norm)
    assert_equal(norms[:1], norms[1:])


SHARED = {
    "one-tensor": lambda memory: (memory[:4], memory[:4]),
    "parts-of-one": lambda memory: (memory[:4], memory[2:6]),
    "rows-and-columns": lambda memory: (memory.view(3, 3)[0], memory.view(3, 3)[:, 0]),
    "an-expanded-element": lambda memory: (memory[:1].expand(4), memory[4:8]),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("scaled_by", ["clipping", "own-scaler", "scaler-around"])
@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_gradients_that_share_memory_are_scaled_once(shared, scaled_by, fused):
    """A fused optimizer writes back what it has divided, element by element and list by list."""
    grads = shared(torch.arange(1.0, 10.0))
    if scaled_by == "scaler-around" and 0 in grads[0].stride():
        pytest.skip("GradScaler refuses to look for inf in it")
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # makes its scale
    opt = AccumulatingOptimizer(
        sgd(parameters, lr=1.0, fused=fused),
        max_norm=1.0 if scaled_by == "clipping" else None,
        scaler=scaler if scaled_by == "own-scaler" else None,
    )
    factor = 0.25
    if scaled_by == "clipping":
        factor = 1 / (sum(float(grad.square().sum()) for grad in grads) ** 0.5 + 1e-6)
    expected = [-factor * grad for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    if scaled_by == "scaler-around":
        scaler.step(opt)
    else:
        opt.step()
    torch.testing.assert_close([p.detach() for p in parameters], expected)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_norm_whose_squares_overflow_only_while_scaled(max_norm):
    """The pass that adds the second micro-batch finds it of gradients that are still scaled."""
    parameter = nn.Parameter(torch.zeros(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**70)  # whose square is no float32
    sgd = torch.optim.SGD([parameter], lr=1.0)
    opt = AccumulatingOptimizer(sgd, window=2, max_norm=max_norm, scaler=scaler)
    for _ in range(2):
        opt.backward((parameter * torch.tensor([3.0, 4.0])).sum())
    opt.step()
    assert not opt.last.skipped
    assert opt.last.total_norm.item() == 5.0
    clipped = torch.tensor([-3.0, -4.0]) * (1.0 if max_norm is None else max_norm / 5.0)
    torch.testing.assert_close(parameter.detach(), clipped, rtol=1e-6, atol=0)
