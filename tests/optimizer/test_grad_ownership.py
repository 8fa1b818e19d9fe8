"""Which gradients become main gradients, and which are copied, since others hold them."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    scalar,
    sgd,
)
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


def test_a_view_of_a_bucket_is_copied():
    """DDP keeps gradients as views of a bucket that it writes again in the next backward pass."""
    parameter = nn.Parameter(torch.zeros(2))
    bucket = torch.zeros(4)
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), window=2, reduction="sum")
    for value in (1.0, 10.0):
        bucket.fill_(value)
        parameter.grad = bucket[:2]
        opt.accumulate()
    opt.step()
    assert parameter.tolist() == [-11.0, -11.0]


def test_the_first_gradient_is_taken_without_a_copy():
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(sgd([parameter]), window=2)
    parameter.sum().backward()
    address = parameter.grad.data_ptr()
    opt.accumulate()
    assert parameter.grad is None
    assert opt._accumulator.window.by_parameter[parameter].data_ptr() == address


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_second_gradient_is_added_to_the_first(in_backward):
    """By autograd where no second set of gradients is to be held, else by one fused pass."""
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(sgd([parameter]), window=3, accumulate_in_backward=in_backward)
    opt.backward(parameter.sum())
    address = opt._accumulator.window.by_parameter[parameter].data_ptr()
    seen = []
    handle = parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    opt.backward(parameter.sum())
    handle.remove()
    assert (seen == [address]) == in_backward
    assert parameter.grad is None
    assert opt._accumulator.window.by_parameter[parameter].data_ptr() == address
    assert opt.main_grad(parameter).tolist() == [2.0] * 2


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_reused_tensor_is_never_written(window):
    """It may be assigned again for the next micro-batch, or be the gradient of two parameters."""
    parameters, grad = [scalar(), scalar()], torch.tensor(2.0)
    alias = grad.data
    opt = AccumulatingOptimizer(sgd(parameters), window=window, max_norm=1.0)
    for step in range(2 * window):
        for parameter in parameters:
            parameter.grad = grad if step % 2 else alias
        opt.step()
    assert grad.item() == 2.0
    clipped = 2.0 / (8.0**0.5 + 1e-6)
    for parameter in parameters:  # two steps of a unit gradient, rounded in float32
        assert parameter.item() == pytest.approx(-2 * clipped, rel=1e-6)


@pytest.mark.parametrize("foreign", ["variable", "alias", "slot", "numpy", "view"])
def test_memory_that_others_hold_is_copied(foreign):
    parameter, other = scalar(), scalar()
    opt = AccumulatingOptimizer(sgd([parameter]), window=2)
    held = torch.zeros(2) if foreign == "view" else torch.zeros(())
    grad = torch.from_numpy(held.numpy().copy()) if foreign == "numpy" else held
    parameter.grad = held[0] if foreign == "view" else grad.data if foreign == "alias" else grad
    if foreign == "slot":
        other.grad = parameter.grad
        del grad, held
        address = other.grad.data_ptr()
    elif foreign == "variable":
        address = grad.data_ptr()
    else:
        address = grad.data_ptr()
        del grad
    opt.accumulate()
    assert opt._accumulator.window.by_parameter[parameter].data_ptr() != address
