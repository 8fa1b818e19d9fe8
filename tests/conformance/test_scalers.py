"""GradScaler."""

from __future__ import annotations

import pytest
import torch
from scaler_protocols import (
    EACH,
    ONCE,
    OWN,
    RATE,
    WINDOW,
    assert_exact,
    loss_of,
    make_optimizer,
    make_parameters,
    make_scaler,
    micro_batch,
    parameters_by_hand,
    protocols,
    scales_by_hand,
)
from support.optimizer_oracle import (
    EXACT,
    ByHand,
    assert_close,
    make_batches,
    make_model,
    parameters_of,
    train_by_hand,
    windows_of,
)
from support.optimizer_oracle import loss_of as model_loss
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

COUNT = 9
BATCHES = make_batches(COUNT)
# Torch's `unscale_` multiplies with a reciprocal that is rounded to float32.
RECIPROCAL = 2.0**-24
POLICIES = ["skip_window", "skip_micro_batch", "raise"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("on_nonfinite", POLICIES)
@pytest.mark.parametrize(("protocol", "dtype"), protocols(*OWN, *EACH, *ONCE))
def test_every_protocol(protocol, dtype, on_nonfinite, fused):
    """The wrapper's own scaler, or yours, with or without `unscale_`: exact, scales by the rule"""
    scaler = make_scaler(protocol)
    parameters = make_parameters(dtype)
    opt = make_optimizer(protocol, parameters, scaler, fused=fused, on_nonfinite=on_nonfinite)
    scales = []
    for number in range(COUNT):
        micro_batch(protocol, opt, scaler, loss_of(parameters, number), number)
        scales.append(scaler.get_scale())
    windows = windows_of(range(COUNT), WINDOW)
    assert_exact(parameters, parameters_by_hand(windows, [[1.0] * WINDOW] * len(windows)))
    assert scales == scales_by_hand(protocol, COUNT)
    assert len(set(scales)) > 1


@pytest.mark.parametrize(("protocol", "dtype"), protocols(*OWN, *EACH, *ONCE))
def test_models_are_as_exact_as_without_a_scaler(protocol, dtype):
    """A network's float32 or half-precision parameters: as exact as by hand without a scaler"""
    batches = make_batches(COUNT, dtype)
    truth = train_by_hand(sgd, make_batches(COUNT), WINDOW)

    reference = train_by_hand(sgd, batches, WINDOW, dtype=dtype)
    scaler = make_scaler(protocol)
    model = make_model(dtype)
    opt = make_optimizer(protocol, model.parameters(), scaler)
    for number, batch in enumerate(batches):
        micro_batch(protocol, opt, scaler, model_loss(model, batch).float(), number)

    # A gradient or a parameter may be rounded the other way in each of the steps.
    tolerance = COUNT // WINDOW * torch.finfo(dtype).eps
    for actual, by_hand, exact in zip(model.parameters(), reference, truth):
        error, reference_error = ((p.double() - exact).abs().max() for p in (actual, by_hand))
        assert error <= reference_error + tolerance


@pytest.mark.parametrize("on_nonfinite", POLICIES)
@pytest.mark.parametrize("change", ["grows-by-1.5", "set-to-16", "set-to-24"])
@pytest.mark.parametrize("protocol", [*OWN, *EACH])
def test_the_scale_may_change_inside_a_window(protocol, change, on_nonfinite):
    """A scale that grows or is set inside a window, also by no power of two, spoils no sum"""
    grows = change == "grows-by-1.5"
    settings = {"growth_factor": 1.5} if grows else {"growth_interval": 100}
    scaler = make_scaler(protocol, **settings)
    model = make_model()
    opt = make_optimizer(protocol, model.parameters(), scaler, on_nonfinite=on_nonfinite)
    scales = []
    for number, batch in enumerate(BATCHES):
        if number == 4 and not grows:
            scaler.update(float(change.rpartition("-")[2]))
        scales.append(scaler.get_scale())
        micro_batch(protocol, opt, scaler, model_loss(model, batch), number)
    assert len(set(scales)) > 1
    assert opt.last.loss_scale == (1.0 if protocol == "each-unscaled" else scales[-1])
    expected = train_by_hand(sgd, BATCHES, WINDOW)
    tolerance = RECIPROCAL if protocol == "each-unscaled" else EXACT
    assert_close(parameters_of(model), expected, tolerance)


@pytest.mark.parametrize("window", [1, 3])
def test_float16_gradients_and_unscale(window):
    """`scaler.unscale_` of float16 gradients is refused by GradScaler itself; `step` takes them"""
    parameters = make_parameters(torch.float16)
    scaler = make_scaler("each")
    opt = AccumulatingOptimizer(sgd(parameters), window=window)
    for number in range(WINDOW):
        scaler.scale(loss_of(parameters, number)).backward()
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    windows = windows_of(range(WINDOW), window)
    assert_exact(parameters, parameters_by_hand(windows, [[1.0] * window] * len(windows)))


@pytest.mark.parametrize("window", [1, 3])
def test_clipping_between_unscale_and_step(window):
    """Your own clip between `scaler.unscale_` and `scaler.step` clips each micro-batch"""
    max_norm = 0.1
    reference, model = make_model(), make_model()
    by_hand, scaler = ByHand(reference.parameters(), sgd), make_scaler("each")
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=window)
    for number, batch in enumerate(BATCHES, 1):
        loss = model_loss(reference, batch)
        grads = torch.autograd.grad(loss, list(reference.parameters()), retain_graph=True)
        coef = max_norm / (torch.cat([grad.flatten() for grad in grads]).norm().item() + 1e-6)
        assert coef < 1.0
        by_hand.add(coef * loss)
        if number % window == 0:
            by_hand.step()
        scaler.scale(model_loss(model, batch)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert_close(parameters_of(model), parameters_of(reference))


@pytest.mark.parametrize("protocol", [*OWN, *EACH])
def test_a_disabled_scaler_is_no_scaler(protocol):
    """`GradScaler(enabled=False)`, the wrapper's own or around it, changes nothing"""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = make_model()
    opt = make_optimizer(protocol, model.parameters(), scaler)
    for number, batch in enumerate(BATCHES):
        micro_batch(protocol, opt, scaler, model_loss(model, batch), number)
    assert_close(parameters_of(model), train_by_hand(sgd, BATCHES, WINDOW))
