"""An audit does not make the host wait for the device while the loop runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.device import DeviceReads, cpu_as_device
from torch import nn
from torch.nn.functional import cross_entropy

import accumext
from accumext import AccumulatingOptimizer


def loop(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler | None) -> None:
    for number in range(6):
        loss = cross_entropy(model(torch.randn(4, 8)), torch.randint(5, (4,))) / 2
        (loss if scaler is None else scaler.scale(loss)).backward()
        if number % 2:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()


def wrapped(model: nn.Module, optimizer: Any, scaler: None) -> None:
    for _ in range(6):
        optimizer.backward(cross_entropy(model(torch.randn(4, 8)), torch.randint(5, (4,))))
        optimizer.step()


def reads_of(audited: bool, run: Any, scaled: bool) -> tuple[int, int]:
    """Of values and of lists, before the block closes."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    if run is wrapped:
        optimizer = AccumulatingOptimizer(optimizer, window=2, max_norm=1.0)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    with accumext.audit(model, optimizer) if audited else nullcontext():
        with cpu_as_device(), DeviceReads() as reads:
            run(model, optimizer, scaler)
        return reads.count, reads.lists


@pytest.mark.parametrize(
    ("run", "scaled"), [(loop, False), (loop, True), (wrapped, False)],
    ids=["bare", "scaler", "wrapper"],
)  # fmt: skip
def test_as_many_reads_as_without(run: Any, scaled: bool):
    assert reads_of(True, run, scaled) == reads_of(False, run, scaled)


def test_a_read_would_be_seen():
    with cpu_as_device(), DeviceReads() as reads:
        float(torch.ones(()))
    assert reads.count == 1
