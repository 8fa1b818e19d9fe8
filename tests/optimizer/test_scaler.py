"""GradScaler: what the optimizer refuses of its own one, and of one around its step."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.optimizer_oracle import (
    OP,
    assert_close,
    loss_of,
    make_batches,
    make_model,
    parameters_of,
    says,
    sgd,
    train_by_hand,
    wrapped,
    wrapped_zeros,
)

BATCHES = make_batches(2)


@pytest.mark.parametrize("inside", [False, True], ids=["beside-an-own-one", "in-a-micro-batch"])
def test_a_step_of_an_outer_scaler_that_is_refused_leaves_nothing_of_it(inside):
    """Attributes that GradScaler sets on an optimizer would scale the next direct call of step."""
    model, scaler = make_model(), torch.amp.GradScaler("cpu")
    opt = wrapped(model, scaler=None if inside else scaler)
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    text = f"{OP}.step: step must be called directly, not through scaler.step, got an outer"
    if inside:
        text = f"{OP}.step: the call must be outside micro_batch()"
    with (
        opt.micro_batch() if inside else nullcontext(),
        pytest.raises(RuntimeError, match=says(text)),
    ):
        scaler.step(opt)
    assert "grad_scale" not in vars(opt)
    if inside:
        opt.discard()
        opt.zero_grad()
        loss_of(model, BATCHES[1]).backward()
    opt.step()
    expected = train_by_hand(sgd, BATCHES[1:] if inside else BATCHES[:1], 1)
    assert_close(parameters_of(model), expected)


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("window", [1, 3])
def test_an_outer_scaler_that_comes_too_late(window, earlier):
    parameter, opt = wrapped_zeros(window)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(earlier):
        opt.backward(parameter * 1)
        opt.step()
    before = parameter.item()
    opt.backward(scaler.scale(parameter * 1))
    text = f"{OP}.step: step must be called directly, not through scaler.step, got gradients taken"
    with pytest.raises(RuntimeError, match=says(text)):
        scaler.step(opt)
    assert parameter.item() == before


def test_own_scaler_wants_scaled_losses():
    parameter, opt = wrapped_zeros(scaler=torch.amp.GradScaler("cpu"))
    (parameter * 1).backward()
    for name in ("accumulate", "step"):
        text = f"{OP}.{name}: the loss must be scaled first, got a scaler that has not scaled any"
        with pytest.raises(RuntimeError, match=says(text)):
            getattr(opt, name)()


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("inner", [False, True])
def test_unscaling_what_the_optimizer_unscales(window, inner):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter, opt = wrapped_zeros(window, scaler=scaler)
    opt.backward(parameter * 1)
    if window == 2:
        parameter.grad = torch.ones(())  # unscale_ wants to see one
    scaler.unscale_(opt.optimizer if inner else opt)
    for name in ("step", "flush", "accumulate", "backward"):
        text = f"{OP}.{name}: .grad must be unscaled by the optimizer alone, which was given the "
        arguments = [parameter * 1] if name == "backward" else []
        with pytest.raises(RuntimeError, match=says(text) + r".*Leave scaler\.unscale_ out"):
            getattr(opt, name)(*arguments)
    scaler._per_optimizer_states.clear()
    opt.discard()


@pytest.mark.parametrize("then", [lambda loss: loss, lambda loss: loss / 4, lambda loss: -loss * 2])
def test_scaling_what_the_optimizer_scales(then):
    scaler = torch.amp.GradScaler("cpu")
    parameter, opt = wrapped_zeros(scaler=scaler)
    text = f"{OP}.backward: loss must be unscaled where the optimizer was given the scaler"
    with pytest.raises(ValueError, match=says(text)):
        opt.backward(then(scaler.scale(parameter * 1)))
    assert parameter.grad is None
    other = torch.tensor(scaler.get_scale())
    opt.backward(then(parameter * other))  # a factor that only equals the scale
    opt.step()
    assert parameter.item() == -then(other).item()
