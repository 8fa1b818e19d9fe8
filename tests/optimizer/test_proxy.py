"""A proxy owns nothing of the optimizer in it: groups, state, defaults, hooks and checkpoints."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.optimizer_oracle import scalar, sgd

from accumext.optimizer._proxy import (
    OptimizerProxy,
    refuse_second_accumulation,
    tell_of_a_skipped_step,
)


class Proxy(OptimizerProxy):
    """The least one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.fixture
def proxy():
    """Around an optimizer with momentum that has stepped once."""
    parameter = scalar()
    parameter.grad = torch.ones(())
    proxy = Proxy(sgd([parameter], momentum=0.5))
    proxy.step()
    return proxy


NAMES = ["param_groups", "state", "defaults", "_optimizer_step_pre_hooks"]


@pytest.mark.parametrize("name", NAMES)
def test_an_attribute_is_the_wrapped_ones_also_where_either_is_rebound(proxy, name):
    for rebound in (proxy, proxy.optimizer):
        assert getattr(proxy, name) is getattr(proxy.optimizer, name)
        setattr(rebound, name, copy.copy(getattr(rebound, name)))
    assert getattr(proxy, name) is getattr(proxy.optimizer, name)
    assert name not in vars(proxy)


def test_other_names_are_looked_up_in_the_wrapped_one(proxy):
    proxy.optimizer.rate_of_friends = 5
    assert proxy.rate_of_friends == 5
    with pytest.raises(AttributeError, match="neither Proxy nor SGD has 'rate_of_foes'"):
        _ = proxy.rate_of_foes


def test_nothing_is_looked_up_before_there_is_a_wrapped_one():
    with pytest.raises(AttributeError, match=r"^optimizer$"):
        _ = Proxy.__new__(Proxy).anything


def test_a_pickle_leaves_out_what_others_lay_on_it(proxy):
    proxy._own, proxy.step, proxy.grad_scale, proxy.found_inf = 1, lambda: None, 2.0, 0.0
    for twin in (copy.deepcopy(proxy), pickle.loads(pickle.dumps(proxy))):
        assert vars(twin).keys() == {"optimizer", "_own"}
        assert twin.optimizer is not proxy.optimizer
        assert isinstance(twin, torch.optim.Optimizer)


# The state known of Accelerate, from modules that look like its own


@pytest.fixture
def steps(monkeypatch):
    """Sets `gradient_accumulation_steps` of this process; None: Accelerate is not imported."""

    def of(count):
        state = SimpleNamespace(GradientState=lambda: SimpleNamespace(num_steps=count))
        if count is None:
            monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
        else:
            monkeypatch.setitem(sys.modules, "accelerate.state", state)

    return of


@pytest.mark.parametrize(("window", "count"), [(4, None), (4, 1), (1, 4), (1, 1), (2, 3)])
def test_only_one_of_both_may_accumulate(steps, window, count):
    steps(count)
    text = "op: window must be 1 where Accelerate accumulates too, got window=2 and "
    text = re.escape(text + "gradient_accumulation_steps=3. Pass")
    with pytest.raises(RuntimeError, match=text) if window == 2 else nullcontext():
        refuse_second_accumulation("op", window)


class AcceleratedOptimizer:
    """As Accelerate's: takes a call of `step` for a step."""

    def __init__(self):
        self._accelerate_step_called = True


def wrapped_by(*holders):
    """An optimizer whose `step` Accelerate has wrapped: its variables are in the closure."""
    first, last = holders

    def step():
        return first, unset, last

    optimizer = SimpleNamespace(step=step)
    if optimizer is None:  # never: a variable of the closure that is not set, as there may be one
        unset = None
    return optimizer


@pytest.mark.parametrize("imported", [True, False], ids=["", "without-accelerate"])
@pytest.mark.parametrize("wraps", [True, False], ids=["", "a-step-of-others"])
def test_the_accelerated_optimizer_hears_that_no_step_was_taken(monkeypatch, imported, wraps):
    fake = SimpleNamespace(AcceleratedOptimizer=AcceleratedOptimizer)
    monkeypatch.setitem(sys.modules, "accelerate.optimizer", fake)
    if not imported:
        monkeypatch.delitem(sys.modules, "accelerate.optimizer")
    holder, other = AcceleratedOptimizer(), SimpleNamespace(_accelerate_step_called=True)
    tell_of_a_skipped_step(wrapped_by(other, holder) if wraps else SimpleNamespace(holder=holder))
    assert holder._accelerate_step_called == (not (imported and wraps))
    assert other._accelerate_step_called
