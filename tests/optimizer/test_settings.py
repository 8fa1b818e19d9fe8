"""What is refused as a setting, a weight, a loss or a call, and in which words; nothing changes."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import INF, NAN, OP, loss_of, make_batches, make_model, says, sgd
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(4)

# The first is wrong, beside the others.
SETTINGS = [
    ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    ({"window": -2}, ValueError, "window must be at least 1, got -2"),
    ({"window": 2.0}, TypeError, "window must be an int, got float"),
    ({"window": True}, TypeError, "window must be an int, got bool"),
    ({"max_norm": NAN}, ValueError, "max_norm must be at least 0, got nan"),
    ({"max_norm": -1.0}, ValueError, "max_norm must be at least 0, got -1.0"),
    ({"max_norm": "1"}, TypeError, "max_norm must be a number, got str"),
    ({"norm_type": 0}, ValueError, "norm_type must be nonzero, got 0"),
    ({"norm_type": NAN}, ValueError, "norm_type must not be NaN, got nan"),
    ({"norm_type": None}, TypeError, "norm_type must be a number, got NoneType"),
    ({"scaler": 2.0}, TypeError, "scaler must be a torch.amp.GradScaler or None, got float"),
    (
        {"on_nonfinite": "skip"},
        ValueError,
        "on_nonfinite must be one of 'skip_window', 'skip_micro_batch', 'raise', got 'skip'",
    ),
    ({"on_nonfinite": None}, TypeError, "on_nonfinite must be one of"),
    ({"reduction": "none"}, ValueError, "reduction must be one of 'mean', 'sum'"),
    (
        {"process_group": [0]},
        TypeError,
        "process_group must be a torch.distributed process group or None, got list",
    ),
    ({"synchronize": "step"}, ValueError, "synchronize must be one of 'backward', 'window'"),
]
for name in ("accumulate_in_backward", "reduce_in_backward"):
    false = f"{name} must be False for"
    SETTINGS += [
        ({name: 1}, TypeError, f"{name} must be a bool, got int"),
        ({name: True, "synchronize": "window"}, ValueError, f"{false} synchronize='window'"),
        *(
            ({name: True, "on_nonfinite": p}, ValueError, f"{false} on_nonfinite={p!r}, which")
            for p in ("skip_micro_batch", "raise")
        ),
    ]


@pytest.mark.parametrize(("arguments", "error", "text"), SETTINGS, ids=str)
def test_a_setting_is_checked_in_the_constructor_and_when_it_is_assigned(arguments, error, text):
    parameters = list(make_model().parameters())
    with pytest.raises(error, match=says(f"{OP}: {text}")):
        AccumulatingOptimizer(sgd(parameters), **arguments)
    (name, value), *others = arguments.items()
    opt = AccumulatingOptimizer(sgd(parameters), **dict(others))
    before = getattr(opt, name)
    with pytest.raises(error, match=says(f"{OP}: {text}")):
        setattr(opt, name, value)
    assert getattr(opt, name) == before


@pytest.mark.parametrize("value", [{"window": 2}, {"max_norm": 1.0}, {"reduce_in_backward": True}])
def test_settings_of_an_optimizer_that_needs_a_closure(value):
    ((name, wrong),) = value.items()
    opt = AccumulatingOptimizer(torch.optim.LBFGS(make_model().parameters()))
    text = rf"^{OP}: {name} must be \w+ for LBFGS, which needs a closure, got"
    with pytest.raises(ValueError, match=text):
        setattr(opt, name, wrong)


def test_an_assigned_setting_is_in_force():
    parameter = nn.Parameter(torch.zeros(2))
    opt = AccumulatingOptimizer(sgd([parameter]), window=2)
    values = {"window": 1, "max_norm": 0.5, "norm_type": INF, "reduction": "sum"}
    for name, value in values.items():
        setattr(opt, name, value)
        assert getattr(opt, name) == value
    opt.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert opt.scaler is None
    opt.backward(parameter.sum(), weight=3.0)
    opt.step()
    assert opt.last.total_norm == 3.0
    assert parameter.tolist() == pytest.approx([-0.5] * 2, rel=1e-6)


def test_an_unknown_attribute_is_an_error_with_the_nearest_name():
    opt = AccumulatingOptimizer(sgd(make_model().parameters()))
    for name, near in (("max_nrom", "max_norm"), ("param_group", "param_groups")):
        with pytest.raises(AttributeError, match=f"has '{name}'; did you mean '{near}'"):
            setattr(opt, name, 1.0)
    with pytest.raises(AttributeError, match=r"neither AccumulatingOptimizer nor SGD has 'xyz'$"):
        opt.xyz = 1
    opt._trainers_own = 1
    assert opt._trainers_own == 1
    opt.optimizer.rate_of_decay = 1
    opt.rate_of_decay = 2
    assert opt.optimizer.rate_of_decay == 2


def test_bad_micro_batches_are_dropped_on_one_device_only():
    parameters = [nn.Parameter(torch.zeros(1, device=device)) for device in ("cpu", "meta")]
    text = f"{OP}: on_nonfinite must be 'skip_window' or 'raise' where parameters are sharded"
    with pytest.raises(ValueError, match=says(text)):
        AccumulatingOptimizer(sgd(parameters), on_nonfinite="skip_micro_batch")


@pytest.mark.parametrize("wrong", [None, 3, make_model(), "wrapped"], ids=str)
def test_constructor_wants_an_unwrapped_optimizer(wrong):
    if wrong == "wrapped":
        wrong = AccumulatingOptimizer(sgd(make_model().parameters()))
    text = f"{OP}: optimizer must be a torch.optim.Optimizer that is not wrapped already, got"
    with pytest.raises(TypeError, match=says(text)):
        AccumulatingOptimizer(wrong)


@pytest.mark.parametrize(
    ("weight", "error", "text"),
    [
        (-1.0, ValueError, "at least 0, got -1.0"),
        (NAN, ValueError, "at least 0, got nan"),
        (INF, ValueError, "finite, got inf"),
        ("1", TypeError, "a number, got str"),
        (None, TypeError, "a number, got NoneType"),
        (torch.tensor(-1.0), ValueError, "at least 0, got -1.0"),
        (torch.tensor(INF), ValueError, "finite, got inf"),
        (torch.ones(2), ValueError, "a number or a 0-dim tensor, got shape [2]"),
        (torch.tensor(True), TypeError, "a real number, got a bool tensor"),
    ],
    ids=str,
)
def test_weight(halfway, weight, error, text):
    model, opt = halfway
    with pytest.raises(error, match=says(f"{OP}.backward: weight must be {text}")):
        opt.backward(loss_of(model, BATCHES[1]), weight)
    loss_of(model, BATCHES[1]).backward()
    with pytest.raises(error, match=says(f"{OP}.accumulate: weight must be {text}")):
        opt.accumulate(weight)
    opt.zero_grad()


class HoldsBack(nn.Module):
    """A wrapper of somebody's."""

    def no_sync(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("method", "argument", "error", "text"),
    [
        ("backward", 1.0, TypeError, "loss must be a tensor, got float"),
        ("backward", torch.ones(2, requires_grad=True), ValueError, "loss must be 0-dim, got"),
        ("backward", torch.tensor(1.0), ValueError, "loss must have a graph, got a tensor without"),
        ("accumulate", 2.0, RuntimeError, ".grad must hold new gradients, got none"),
        ("main_grad", torch.ones(4, 3), ValueError, "parameter must be a parameter of this"),
        ("micro_batch", 3, TypeError, "model must be a torch.nn.Module or None, got int"),
        ("micro_batch", len, TypeError, "model must be a torch.nn.Module or None, got builtin"),
        ("micro_batch", HoldsBack(), TypeError, "model must be a DistributedDataParallel or fully"),
    ],
)
def test_arguments_of_calls(halfway, method, argument, error, text):
    call = getattr(halfway[1], method)
    with pytest.raises(error, match=says(f"{OP}.{method}: {text}")):
        call(argument) if method != "micro_batch" else call(argument).__enter__()


@pytest.mark.parametrize(
    "call",
    [
        lambda opt: opt.accumulate(),
        lambda opt: opt.step(),
        lambda opt: opt.flush(),
        lambda opt: opt.discard(),
        lambda opt: opt.micro_batch().__enter__(),
        lambda opt: opt.load_accumulation_state_dict({}),
    ],
)
def test_calls_that_a_micro_batch_cannot_contain(halfway, call):
    opt = halfway[1]
    with opt.micro_batch(), pytest.raises(RuntimeError, match=r"be outside micro_batch\(\)"):
        call(opt)
