"""GradScaler: what the optimizer refuses of its own one, and of one around its step."""

from contextlib import nullcontext

import pytest
import torch
from support import optimizer_oracle as oracle
from support.optimizer_oracle import OP

BATCHES = oracle.make_batches(2)


@pytest.mark.parametrize("inside", [False, True], ids=["beside-an-own-one", "in-a-micro-batch"])
def test_a_step_of_an_outer_scaler_that_is_refused_leaves_nothing_of_it(inside):
    """Attributes that GradScaler sets on an optimizer would scale the next direct call of step."""
    model, scaler = oracle.make_model(), torch.amp.GradScaler("cpu")
    opt = oracle.wrapped(model, scaler=None if inside else scaler)
    scaler.scale(oracle.loss_of(model, BATCHES[0])).backward()
    text = f"{OP}.step: step must be called directly, not through scaler.step, got an outer"
    if inside:
        text = f"{OP}.step: the call must be outside micro_batch()"
    with (
        opt.micro_batch() if inside else nullcontext(),
        pytest.raises(RuntimeError, match=oracle.says(text)),
    ):
        scaler.step(opt)
    assert "grad_scale" not in vars(opt)
    if inside:
        opt.discard()
        opt.zero_grad()
        oracle.loss_of(model, BATCHES[1]).backward()
    opt.step()
    expected = oracle.train_by_hand(oracle.sgd, BATCHES[1:] if inside else BATCHES[:1], 1)
    oracle.assert_close(oracle.parameters_of(model), expected)


def test_own_scaler_wants_scaled_losses():
    parameter, opt = oracle.wrapped_zeros(scaler=torch.amp.GradScaler("cpu"))
    (parameter * 1).backward()
    for name in ("accumulate", "step"):
        text = f"{OP}.{name}: the loss must be scaled first, got a scaler that has not scaled any"
        with pytest.raises(RuntimeError, match=oracle.says(text)):
            getattr(opt, name)()


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("inner", [False, True])
def test_unscaling_what_the_optimizer_unscales(window, inner):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter, opt = oracle.wrapped_zeros(window, scaler=scaler)
    opt.backward(parameter * 1)
    if window == 2:
        parameter.grad = torch.ones(())  # unscale_ wants to see one
    scaler.unscale_(opt.optimizer if inner else opt)
    for name in ("step", "flush", "accumulate", "backward"):
        text = f"{OP}.{name}: .grad must be unscaled by the optimizer alone, which was given the "
        arguments = [parameter * 1] if name == "backward" else []
        with pytest.raises(RuntimeError, match=oracle.says(text) + r".*Leave scaler\.unscale_ out"):
            getattr(opt, name)(*arguments)
    scaler._per_optimizer_states.clear()
    opt.discard()


@pytest.mark.parametrize("then", [lambda loss: loss, lambda loss: loss / 4, lambda loss: -loss * 2])
def test_scaling_what_the_optimizer_scales(then):
    scaler = torch.amp.GradScaler("cpu")
    parameter, opt = oracle.wrapped_zeros(scaler=scaler)
    text = f"{OP}.backward: loss must be unscaled if the optimizer was given the scaler"
    with pytest.raises(ValueError, match=oracle.says(text)):
        opt.backward(then(scaler.scale(parameter * 1)))
    assert parameter.grad is None
    other = torch.tensor(scaler.get_scale())
    opt.backward(then(parameter * other))  # a factor that only equals the scale
    opt.step()
    assert parameter.item() == -then(other).item()


def test_the_scale_of_a_scaler_around_a_step_is_that_of_its_micro_batch():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter, opt = oracle.wrapped_zeros(2)
    scaler.scale(parameter * 1).backward()
    scaler.step(opt)
    opt.backward(parameter * 3)
    opt.step()
    assert opt.last.loss_scale == 1.0
    assert parameter.item() == -2.0
