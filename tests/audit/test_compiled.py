"""Models that torch.compile has translated: the same bits, no break of the graph, and findings."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import accumext

N = 2  # micro-batches of a step


def train(audited: bool, whole: bool, divisor: int) -> tuple[list[torch.Tensor], Any]:
    """`whole`: the loss is compiled, too, and what it counts cannot be seen."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y)

    compiled = torch.compile(loss_of if whole else model, fullgraph=True, backend="aot_eager")
    with accumext.audit(model, optimizer) if audited else nullcontext() as audit:
        for i in range(4 * N):
            x, y = torch.randn(6, 8), torch.randint(5, (6,))
            loss = compiled(x, y) if whole else cross_entropy(compiled(x), y)
            (loss / divisor).backward()
            if i % N == N - 1:
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], audit


@pytest.mark.parametrize("whole", [False, True], ids=["model", "loss"])
@pytest.mark.parametrize(("divisor", "found"), [(N, []), (1, [("divisor missing", float(N))])])
def test_compiled(whole: bool, divisor: int, found: list[tuple[str, float]]):
    parameters, audit = train(True, whole, divisor)
    plain, _ = train(False, whole, divisor)
    assert all(map(torch.equal, parameters, plain))
    assert [(f.name, pytest.approx(f.value, rel=1e-6)) for f in audit.findings] == found
