"""What is refused as an argument, a loss or a weight, and in which words; nothing has changed."""

from __future__ import annotations

import pytest
import torch
from support.optimizer_oracle import (
    INF,
    NAN,
    OP,
    loss_of,
    make_batches,
    make_model,
    says,
    sgd,
)
from torch import nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

BATCHES = make_batches(4)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"window": 0}, ValueError, f"{OP}: window must be at least 1, got 0"),
        ({"window": -2}, ValueError, f"{OP}: window must be at least 1, got -2"),
        ({"window": 2.0}, TypeError, f"{OP}: window must be an int, got float"),
        ({"window": True}, TypeError, f"{OP}: window must be an int, got bool"),
        ({"max_norm": NAN}, ValueError, f"{OP}: max_norm must be at least 0, got nan"),
        ({"max_norm": -1.0}, ValueError, f"{OP}: max_norm must be at least 0, got -1.0"),
        ({"max_norm": "1"}, TypeError, f"{OP}: max_norm must be a number, got str"),
        ({"norm_type": 0}, ValueError, f"{OP}: norm_type must be nonzero, got 0"),
        ({"norm_type": NAN}, ValueError, f"{OP}: norm_type must not be NaN, got nan"),
        ({"norm_type": None}, TypeError, f"{OP}: norm_type must be a number, got NoneType"),
        (
            {"scaler": 2.0},
            TypeError,
            f"{OP}: scaler must be a torch.amp.GradScaler or None, got float",
        ),
        (
            {"on_nonfinite": "skip"},
            ValueError,
            f"{OP}: on_nonfinite must be one of 'skip_window', 'skip_micro_batch', 'raise', "
            "got 'skip'",
        ),
        ({"on_nonfinite": None}, TypeError, f"{OP}: on_nonfinite must be one of"),
        ({"reduction": "none"}, ValueError, f"{OP}: reduction must be one of 'mean', 'sum'"),
        (
            {"process_group": 3},
            TypeError,
            f"{OP}: process_group must be a torch.distributed process group or None, got int",
        ),
        (
            {"accumulate_in_backward": 1},
            TypeError,
            f"{OP}: accumulate_in_backward must be a bool, got int",
        ),
        (
            {"accumulate_in_backward": True, "on_nonfinite": "skip_micro_batch"},
            ValueError,
            f"{OP}: accumulate_in_backward must be False for on_nonfinite='skip_micro_batch'",
        ),
        (
            {"accumulate_in_backward": True, "on_nonfinite": "raise"},
            ValueError,
            f"{OP}: accumulate_in_backward must be False for on_nonfinite='raise', which looks at",
        ),
        (
            {"reduce_in_backward": 1},
            TypeError,
            f"{OP}: reduce_in_backward must be a bool, got int",
        ),
        (
            {"reduce_in_backward": True, "on_nonfinite": "raise"},
            ValueError,
            f"{OP}: reduce_in_backward must be False for on_nonfinite='raise', which looks at",
        ),
    ],
    ids=str,
)
def test_constructor(arguments, error, text):
    with pytest.raises(error, match=says(text)):
        AccumulatingOptimizer(sgd(make_model().parameters()), **arguments)


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
        (-1.0, ValueError, "weight must be at least 0, got -1.0"),
        (NAN, ValueError, "weight must be at least 0, got nan"),
        (INF, ValueError, "weight must be finite, got inf"),
        ("1", TypeError, "weight must be a number, got str"),
        (None, TypeError, "weight must be a number, got NoneType"),
        (torch.tensor(-1.0), ValueError, "weight must be at least 0, got -1.0"),
        (torch.tensor(INF), ValueError, "weight must be finite, got inf"),
        (torch.ones(2), ValueError, "weight must be a number or a 0-dim tensor, got shape [2]"),
        (torch.tensor(True), TypeError, "weight must be a real number, got a bool tensor"),
    ],
    ids=str,
)
def test_weight(halfway, weight, error, text):
    model, opt = halfway
    with pytest.raises(error, match=says(f"{OP}.backward: {text}")):
        opt.backward(loss_of(model, BATCHES[1]), weight)
    loss_of(model, BATCHES[1]).backward()
    with pytest.raises(error, match=says(f"{OP}.accumulate: {text}")):
        opt.accumulate(weight)
    opt.zero_grad()


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (1.0, TypeError, "loss must be a tensor, got float"),
        (torch.ones(2, requires_grad=True), ValueError, "loss must be 0-dim, got shape [2]"),
        (torch.tensor(1.0), ValueError, "loss must have a graph, got a tensor without one"),
    ],
    ids=["float", "vector", "no-graph"],
)
def test_loss(halfway, loss, error, text):
    with pytest.raises(error, match=says(f"{OP}.backward: {text}")):
        halfway[1].backward(loss)
