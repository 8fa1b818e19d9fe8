"""An AccumulatingOptimizer is recognised inside of what frameworks put around it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import accumext
from accumext import AccumulatingOptimizer


class Shell:
    """As Accelerate and Lightning have one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


@pytest.mark.parametrize("shells", [0, 1, 2])
def test_a_wrapper_in_shells(shells: int):
    """Its scaled micro-batches, its clip and its sum in float32 are no mistakes"""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).bfloat16()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = AccumulatingOptimizer(sgd, window=16, max_norm=0.01, scaler=scaler)
    given: Any = optimizer
    for _ in range(shells):
        given = Shell(given)
    with accumext.audit(model, given, windows=2) as audit:
        for _ in range(32):
            x, y = torch.randn(6, 8).bfloat16(), torch.randint(5, (6,))
            optimizer.backward(cross_entropy(model(x).float(), y))
            optimizer.step()
    assert audit.findings == ()
    assert audit.record.wrapped
    told = re.findall(r"gradient: (\S+) times the mean of 16 losses", str(audit))
    assert [float(factor) for factor in told] == [pytest.approx(1.0, rel=2**-7)] * 2  # bfloat16's
