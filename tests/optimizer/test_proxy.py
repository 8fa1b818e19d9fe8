"""A proxy owns nothing of the optimizer in it: groups, state, defaults, hooks and checkpoints."""

import copy
import pickle

import pytest
import torch
from support.optimizer_oracle import scalar, sgd

from accumext.optimizer._proxy import OptimizerProxy


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
