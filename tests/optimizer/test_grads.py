"""Whose gradient it is: what lies in `.grad` is known by what the wrapper did, not by the tensor.

With a window of one, every use here is that of the bare optimizer, which is the oracle.
"""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from support import optimizer_oracle as oracle
from support.recorded_warnings import warnings_as

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = oracle.make_batches(2)


def same_tensor(opt, p):
    grad = torch.ones(())
    for _ in range(3):
        p.grad = grad
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


USES = [same_tensor, shared_with_numpy, made_in_inference_mode, line_search]


@pytest.mark.parametrize("kind", ["sgd", "sgd-momentum", "adam"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_window_of_one_takes_whatever_lies_in_grad(use, kind):
    results = []
    for wrap in (lambda bare: bare, AccumulatingOptimizer):
        parameter = oracle.scalar()
        use(wrap(oracle.OPTIMIZERS[kind]([parameter])), parameter)
        results.append(parameter.item())
    assert results[0] == results[1] != 0.0


def test_parameters_carry_no_hooks_and_copies_say_nothing():
    model = oracle.make_model()
    oracle.run(oracle.wrapped(model), model, BATCHES)
    assert not any(p._backward_hooks or oracle.hooks_of(model) for p in model.parameters())
    with warnings_as("always") as said:
        copy.deepcopy(model), pickle.dumps(list(model.parameters()))
    assert said == []


def test_an_optimizer_keeps_nothing_alive():
    parameter, opt = oracle.wrapped_zeros(shape=2)
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
    parameter, opt = oracle.wrapped_zeros(shape=1000)
    for _ in range(20):
        parameter.grad = None
        opt.backward(parameter.sum())
        opt.step()
        parameter.grad = None  # as model.zero_grad() does
        parameter.sum().backward()
        opt.flush()
        assert opt.stepped
    oracle.assert_equal([parameter.detach()], [torch.full((1000,), -40.0)])


@pytest.mark.usefixtures("alone")
def test_nor_are_they_among_processes_but_for_views():
    """Which may lie in buckets of DistributedDataParallel."""
    parameter, opt = oracle.wrapped_zeros(shape=2)
    opt.backward(parameter.sum())
    opt.step()
    gone = weakref.ref(parameter.grad)
    parameter.grad = None
    assert gone() is None


def test_a_view_with_the_values_of_the_last_gradient_is_a_new_one():
    parameter, opt = oracle.wrapped_zeros()
    for _ in range(2):
        parameter.grad = torch.ones(2)[0]
        opt.flush()
    assert parameter.item() == -2.0
    parameter.grad = torch.zeros(2)[0]
    opt.backward(parameter)  # which adds to the view
    opt.step()
    parameter.grad = torch.ones(2)[0]
    opt.step()
    assert parameter.item() == -4.0
