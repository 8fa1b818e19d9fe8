"""GradScaler: what the optimizer refuses of its own one, and of one around its step."""

from __future__ import annotations

import re

import pytest
import torch
from support.optimizer_oracle import (
    OP,
    assert_close,
    assert_equal,
    loss_of,
    make_batches,
    make_model,
    says,
    sgd,
    train_by_hand,
    wrapped_scalar,
)

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(4)


def test_outer_scaler_beside_an_own_one():
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    opt = AccumulatingOptimizer(sgd(model.parameters()), scaler=scaler)
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    text = f"{OP}.step: step must be called directly, not through scaler.step, got an outer"
    with pytest.raises(RuntimeError, match=says(text)):
        scaler.step(opt)
    assert "grad_scale" not in vars(opt)
    opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[:1], 1))


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("window", [1, 3])
def test_outer_scaler_too_late(window, earlier):
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    opt = AccumulatingOptimizer(sgd(model.parameters()), window=window)
    for _ in range(earlier):
        opt.backward(loss_of(model, BATCHES[0]))
        opt.step()
    before = [p.detach().clone() for p in model.parameters()]
    opt.backward(scaler.scale(loss_of(model, BATCHES[0])))
    text = f"{OP}.step: step must be called directly, not through scaler.step, got gradients taken"
    with pytest.raises(RuntimeError, match=says(text)):
        scaler.step(opt)
    assert_equal([p.detach() for p in model.parameters()], before)


def test_own_scaler_wants_scaled_losses():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()), scaler=torch.amp.GradScaler("cpu"))
    loss_of(model, BATCHES[0]).backward()
    for name in ("accumulate", "step"):
        text = f"{OP}.{name}: the loss must be scaled first, got a scaler that has not scaled any"
        with pytest.raises(RuntimeError, match=says(text)):
            getattr(opt, name)()


def test_a_step_of_an_outer_scaler_that_is_refused_leaves_nothing_of_it():
    """What GradScaler lays on an optimizer would scale the next step that is called directly."""
    model = make_model()
    opt, scaler = AccumulatingOptimizer(sgd(model.parameters())), torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    with opt.micro_batch(), pytest.raises(RuntimeError, match=r"be outside micro_batch\(\)"):
        scaler.step(opt)
    opt.discard()
    opt.zero_grad()
    loss_of(model, BATCHES[1]).backward()
    opt.step()
    assert_close([p.detach() for p in model.parameters()], train_by_hand(sgd, BATCHES[1:2], 1))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("inner", [False, True])
def test_unscaling_what_the_optimizer_unscales(window, inner):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter, opt = wrapped_scalar(window, scaler=scaler)
    opt.backward(parameter * 1)
    if window == 2:
        parameter.grad = torch.ones(())  # unscale_ wants to see one
    scaler.unscale_(opt.optimizer if inner else opt)
    text = f"{OP}.{{}}: .grad must be unscaled by the optimizer alone, which was given the scaler"
    for name in ("step", "flush", "accumulate"):
        with pytest.raises(RuntimeError, match=re.escape(text.format(name))):
            getattr(opt, name)()
    with pytest.raises(RuntimeError, match=r"Leave scaler\.unscale_ out"):
        opt.backward(parameter * 1)
    scaler._per_optimizer_states.clear()
    opt.discard()


@pytest.mark.parametrize("then", [lambda loss: loss, lambda loss: loss / 4, lambda loss: -loss * 2])
def test_scaling_what_the_optimizer_scales(then):
    scaler = torch.amp.GradScaler("cpu")
    parameter, opt = wrapped_scalar(scaler=scaler)
    text = f"{OP}.backward: loss must be unscaled where the optimizer was given the scaler"
    with pytest.raises(ValueError, match=re.escape(text)):
        opt.backward(then(scaler.scale(parameter * 1)))
    assert parameter.grad is None
    other = torch.tensor(scaler.get_scale())
    opt.backward(then(parameter * other))  # a factor that only equals the scale
    opt.step()
    assert parameter.item() == -then(other).item()
