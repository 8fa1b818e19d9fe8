"""Whose gradient it is: what lies in `.grad` is known by what the wrapper did, not by the tensor.

With a window of one, every use here is that of the bare optimizer, which is the oracle.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from support.optimizer_oracle import (
    INF,
    assert_equal,
    hooks_of,
    loss_of,
    make_batches,
    make_model,
    scalar,
    sgd,
)
from support.recorded_warnings import warnings_as
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer


def both(use, make=sgd, **kwargs):
    """What a use of an optimizer makes of a parameter: the bare one's, and the wrapper's."""
    results = []
    for wrap in (lambda optimizer: optimizer, lambda o: AccumulatingOptimizer(o, **kwargs)):
        parameter = scalar()
        use(wrap(make([parameter])), parameter)
        results.append(parameter.item())
    return results


def same_tensor(opt, p):
    grad = torch.ones(())
    for _ in range(3):
        p.grad = grad
        opt.step()


def written_through_data(opt, p):
    p.grad = torch.zeros(())
    for value in (1.0, 2.0, 3.0):
        p.grad.data.copy_(torch.tensor(value))
        opt.step()


def written_in_place(opt, p):
    p.grad = torch.zeros(())
    for value in (1.0, 2.0, 3.0):
        p.grad.fill_(value)
        opt.step()


def shared_with_numpy(opt, p):
    array = np.zeros((), dtype=np.float32)
    p.grad = torch.from_numpy(array)
    for value in (1.0, 2.0, 3.0):
        array[...] = value
        opt.step()


def made_in_inference_mode(opt, p):
    for value in (1.0, 2.0):
        with torch.inference_mode():
            grad = torch.full((), value)
        p.grad = grad
        opt.step()


def added_up(opt, p):
    for _ in range(3):
        (p * 2).backward()
        opt.step()


def stepped_on_again(opt, p):
    (p * 2).backward()
    for _ in range(3):
        opt.step()


def replayed(opt, p):
    """As a captured backward pass writes: into the same memory, of which nobody is told."""
    (p * 1).backward()
    opt.step()
    for value in (5.0, 7.0):
        torch.from_numpy(p.grad.detach().numpy()).fill_(value)
        opt.step()


def line_search(opt, p):
    """The step is taken back, and taken again with half the rate."""
    (p * 4).backward()
    for rate in (1.0, 0.5, 0.25):
        before = p.detach().clone()
        for group in opt.param_groups:
            group["lr"] = rate
        opt.step()
        if rate > 0.25:
            p.data.copy_(before)


def zeroed(opt, p):
    (p * 2).backward()
    opt.step()
    for _ in range(2):
        opt.zero_grad(set_to_none=False)
        opt.step()


def zeroed_by_hand(opt, p):
    (p * 2).backward()
    opt.step()
    p.grad.data.zero_()
    opt.step()


USES = [
    same_tensor,
    written_through_data,
    written_in_place,
    shared_with_numpy,
    made_in_inference_mode,
    added_up,
    stepped_on_again,
    replayed,
    line_search,
    zeroed,
    zeroed_by_hand,
]


def with_momentum(parameters):
    return sgd(parameters, momentum=0.5, weight_decay=0.25)


@pytest.mark.parametrize("make", [sgd, with_momentum, torch.optim.Adam], ids=lambda m: m.__name__)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_window_of_one_takes_whatever_lies_in_grad(use, make):
    bare, wrapped = both(use, make)
    assert wrapped == bare
    assert bare != 0.0


def test_a_gradient_written_under_an_own_scaler_is_stepped_on_each_time():
    parameter = scalar()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    opt = AccumulatingOptimizer(sgd([parameter]), scaler=scaler)
    scaler.scale(parameter * 1).backward()
    for _ in range(3):
        parameter.grad.data.fill_(4.0)
        opt.step()
    assert parameter.item() == -3 * 4.0 / 2.0


@pytest.mark.parametrize("window", [1, 2])
def test_a_plain_backward_pass_after_the_wrappers(window):
    """It adds to `.grad`, which in a window of one is the window."""
    parameter = scalar()
    opt = AccumulatingOptimizer(sgd([parameter]), window=window)
    opt.backward(parameter * 1, weight=3.0)
    (parameter * 5).backward()
    opt.step()
    assert parameter.item() == (-(1 + 5) if window == 1 else -(3.0 * 1 + 1.0 * 5) / 4.0)
    assert opt.last.micro_batches == window


def test_it_is_unscaled_with_the_scale_of_its_own_backward_pass():
    parameter, scaler = scalar(), torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = AccumulatingOptimizer(sgd([parameter]), window=2, scaler=scaler)
    opt.backward(parameter * 1)
    scaler.update(16.0)
    scaler.scale(parameter * 5).backward()
    opt.step()
    assert parameter.item() == -3.0
    assert opt.last.loss_scale == 16.0


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("bad", [0, 1])
def test_it_is_dropped_with_its_micro_batch(window, bad):
    parameter = scalar()
    opt = AccumulatingOptimizer(sgd([parameter]), window=window, on_nonfinite="skip_micro_batch")
    opt.backward(parameter * (INF if bad == 0 else 1.0))
    (parameter * (INF if bad == 1 else 5.0)).backward()
    opt.step()
    assert opt.last.micro_batches == window - 1
    assert parameter.item() == (0.0 if window == 1 else -5.0 if bad == 0 else -1.0)


def test_parameters_carry_no_hooks_and_copies_say_nothing():
    model, batches = make_model(), make_batches(2)
    opt = AccumulatingOptimizer(sgd(model.parameters()))
    for batch in batches:
        opt.backward(loss_of(model, batch))
        opt.step()
        assert not any(p._backward_hooks or hooks_of(model) for p in model.parameters())
    with warnings_as("always") as said:
        copy.deepcopy(model), pickle.dumps(list(model.parameters()))
    assert said == []


def test_an_optimizer_keeps_nothing_alive():
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(sgd([parameter]))
    opt.backward(parameter.sum())
    opt.step()
    gone = [weakref.ref(parameter), weakref.ref(opt)]
    gc.disable()
    try:
        del opt, parameter
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_gradients_of_the_last_step_are_not_kept_alive():
    """Nor found again in other memory that has their address."""
    parameter = nn.Parameter(torch.zeros(1000))
    opt = AccumulatingOptimizer(sgd([parameter]))
    for _ in range(20):
        parameter.grad = None
        opt.backward(parameter.sum())
        opt.step()
        parameter.grad = None  # as model.zero_grad() does
        parameter.sum().backward()
        opt.flush()
        assert opt.stepped
    assert_equal([parameter.detach()], [torch.full((1000,), -40.0)])


@pytest.mark.parametrize("loop", ["own", "plain"])
def test_flush_steps_on_nothing_twice(loop):
    parameter = scalar()
    opt = AccumulatingOptimizer(sgd([parameter]))
    if loop == "own":
        opt.backward(parameter * 1)
    else:
        (parameter * 1).backward()
    opt.step()
    opt.flush()
    assert not opt.stepped
    assert parameter.item() == -1.0
    opt.zero_grad(set_to_none=False)
    opt.flush()
    assert not opt.stepped
    (parameter * 3).backward()
    opt.flush()
    assert opt.stepped
    assert parameter.item() == -4.0


@pytest.mark.parametrize("written", ["in place", "replaced"])
def test_what_a_step_has_used_up_is_new_once_it_is_written(written):
    parameter = scalar()
    opt = AccumulatingOptimizer(sgd([parameter]))
    opt.backward(parameter * 1)
    opt.step()
    opt.step()
    assert parameter.item() == -1.0
    if written == "in place":
        parameter.grad.mul_(3.0)
    else:
        parameter.grad = torch.tensor(3.0)
    opt.step()
    assert parameter.item() == -4.0


def test_what_a_step_has_used_stays_used_beside_what_others_bring():
    used, other = scalar(), scalar()
    opt = AccumulatingOptimizer(sgd([used, other]))
    opt.backward(used * 1.0)
    opt.step()
    other.grad = torch.ones(())
    for steps in (1, 2):  # a tensor that was assigned is a gradient again and again
        opt.step()
        assert (used.item(), other.item()) == (-1.0, -steps)


def test_what_took_the_place_of_a_brought_gradient_is_nobodys():
    parameter, other = scalar(), scalar()
    opt = AccumulatingOptimizer(sgd([parameter, other]))
    opt.backward(parameter * 1.0 + other * 1.0)
    parameter.grad = torch.tensor(2.0)
    for steps in (1, 2):
        opt.step()
        assert (parameter.item(), other.item()) == (-2.0 * steps, -1.0)


BATCHES = make_batches(8)


def test_window_of_one_keeps_gradients_visible():
    model = make_model()
    opt = AccumulatingOptimizer(sgd(model.parameters()))
    opt.backward(loss_of(model, BATCHES[0]))
    grads = [p.grad for p in model.parameters()]
    assert_equal(grads, torch.autograd.grad(loss_of(model, BATCHES[0]), list(model.parameters())))
    opt.step()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads))
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_may_be_changed_between_backward_and_step(reduction):
    """In place, and by another tensor."""
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), reduction=reduction)
    opt.backward(parameter.sum())
    parameter.grad = torch.tensor([5.0, 6.0])
    parameter.grad.mul_(2.0)
    opt.step()
    assert parameter.tolist() == [-10.0, -12.0]


# Groups that are added


def test_a_group_added_before_the_step_joins_and_steps_once():
    first, second = scalar(), scalar()
    opt = AccumulatingOptimizer(sgd([first]))
    opt.backward((first * 3).sum())
    opt.add_param_group({"params": [second]})
    opt.step()
    opt.step()
    assert (first.item(), second.item()) == (-3.0, 0.0)
    opt.backward(first * 1 + second * 5)
    opt.step()
    assert (first.item(), second.item()) == (-4.0, -5.0)


@pytest.mark.parametrize("loop", ["own", "plain"])
@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
def test_a_group_added_inside_an_open_window_joins_it(policy, loop):
    first, second = scalar(), scalar()
    opt = AccumulatingOptimizer(sgd([first]), window=3, reduction="sum", on_nonfinite=policy)
    for i, loss in enumerate((lambda: first * 1, *[lambda: first * 10 + second * 5] * 2)):
        if i == 1:
            opt.add_param_group({"params": [second]})
        opt.backward(loss()) if loop == "own" else loss().backward()
        opt.step()
    assert opt.stepped
    assert (first.item(), second.item()) == (-21.0, -10.0)
    opt.step()
    assert not opt.stepped


# As the bare optimizer leaves `.grad`


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("around", [True, False], ids=["around", "own"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_after_a_step_the_gradient_is_unscaled_and_clipped(max_norm, around, unscales):
    """1, not 1024, of an optimizer that is not fused, as stock PyTorch leaves it."""
    parameter, scaler = scalar(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    own = None if around else scaler
    opt = AccumulatingOptimizer(sgd([parameter]), max_norm=max_norm, scaler=own)
    if around:
        scaler.scale(parameter * 1).backward()
        if unscales:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    else:
        opt.backward(parameter * 1)
        opt.step()
    assert parameter.grad.item() == pytest.approx(max_norm or 1.0, rel=1e-5)
    assert parameter.item() == -parameter.grad.item()
