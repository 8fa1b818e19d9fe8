"""What an audit must tell apart: other optimizers, fused ones, nested calls, unscaled losses."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR
from torch.utils.checkpoint import checkpoint

import accumext
from accumext import AccumulatingOptimizer

N, SCALE = 4, 1024.0
NAN = float("nan")


def parts(fused: bool = False) -> tuple[nn.Sequential, torch.optim.SGD, torch.amp.GradScaler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=SCALE)


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return cross_entropy(model(factor * torch.randn(6, 8)), torch.randint(5, (6,)))


def told(audit: accumext.Audit) -> list[tuple[str, Any]]:
    return [(finding.name, pytest.approx(finding.value, rel=1e-3)) for finding in audit.findings]


def test_another_optimizer_is_unscaled():
    model, optimizer, scaler = parts()
    other, of_other, _ = parts()
    with accumext.audit(model, optimizer) as audit:
        scaler.scale(loss_of(model) + loss_of(other)).backward()
        scaler.unscale_(of_other)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.step(of_other)
        scaler.update()
    assert told(audit) == [("clip before unscale", SCALE)]


def test_what_the_scaler_does_by_itself_is_not_the_loops():
    model, optimizer, scaler = parts()
    with accumext.audit(model, optimizer) as audit:
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert "unscale_" not in str(audit)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_of_a_fused_optimizer(fused: bool):
    model, optimizer, scaler = parts(fused)
    with accumext.audit(model, optimizer) as audit:
        for _ in range(N):
            scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert told(audit) == [("divisor missing", N)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_skips_by_itself(fused: bool):
    model, optimizer, scaler = parts(fused)
    with accumext.audit(model, optimizer) as audit:
        for factor in (1.0, NAN, 1.0):
            scaler.scale(loss_of(model, factor)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert told(audit) == [("steps skipped", 1)]


@pytest.mark.filterwarnings("ignore:.*a window was skipped")
def test_a_wrapper_skips_a_window():
    model, optimizer, _ = parts()
    opt = AccumulatingOptimizer(optimizer, window=2)
    with accumext.audit(model, opt) as audit:
        for factor in (1.0, 1.0, 1.0, NAN, 1.0, 1.0, 1.0, 1.0):
            opt.backward(loss_of(model, factor))
            opt.step()
    assert told(audit) == [("steps skipped", 1)]
    assert audit.record.windows == 4


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_of_schedules_steps_once():
    model, optimizer, _ = parts()
    both = [ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)]
    schedule = SequentialLR(optimizer, both, milestones=[2])
    with accumext.audit(model, optimizer) as audit:
        for i in range(3 * N):
            (loss_of(model) / N).backward()
            if i % N == N - 1:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    assert told(audit) == [("scheduler steps per micro-batch", N)]


def test_backward_of_chosen_inputs():
    model, optimizer, _ = parts()
    with accumext.audit(model, optimizer) as audit:
        for _ in range(N):
            loss_of(model).backward(inputs=list(model.parameters()))
        optimizer.step()
    assert told(audit) == [("divisor missing", N)]


def test_a_pass_inside_of_a_pass():
    """A reentrant checkpoint runs a backward pass of its own, before the first layer's is due"""
    model, optimizer, _ = parts()

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(model[1:], model[0](x), use_reentrant=True)
        return hidden

    with accumext.audit(model, optimizer) as audit:
        for _ in range(N):
            cross_entropy(forward(torch.randn(6, 8)), torch.randint(5, (6,))).backward()
        optimizer.step()
    assert told(audit) == [("divisor missing", N)]
    assert "4 x backward (6 targets)" in str(audit)


def test_a_loss_that_was_not_scaled():
    model, optimizer, scaler = parts()
    with accumext.audit(model, optimizer) as audit:
        scaler.scale(loss_of(model) / 2).backward()
        (loss_of(model) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
    assert told(audit) == [("scales mixed in one sum", SCALE)]


def test_nothing_is_left_on_nodes_that_live_on():
    """As those of DistributedDataParallel do"""
    model, optimizer, _ = parts()
    nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
    with accumext.audit(model, optimizer) as audit:
        passes = weakref.ref(audit._observer._passes)
        loss_of(model).backward()
    gc.collect()
    assert passes() is None
    assert len(nodes) == 4
