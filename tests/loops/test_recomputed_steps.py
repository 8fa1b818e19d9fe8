"""Recomputed steps by themselves: how often each runs, and where they start from."""

from typing import Any

import pytest
import torch
from torch import Tensor

from accumext.loops._checkpoint_plan import Plan, Sizes, advances
from accumext.loops._recomputed_steps import RecomputedSteps, memory
from accumext.recurrence import KeptState

CPU = torch.device("cpu")
NOTHING = KeptState("op", "step", None)


def counted_steps(
    steps: int, plan: Plan | None, **options: Any
) -> tuple[RecomputedSteps, list[int], Tensor]:
    """x <- sin(x + w) with x summed up, and the steps that ran, in order."""
    ran: list[int] = []
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def step(t: int, carry: Any, counted: bool) -> tuple[Any, Tensor]:
        ran.append(t)
        x = torch.sin(carry[0] + weight)
        return (x, carry[1]), x

    def choose(sizes: Sizes) -> Plan:
        ran.append(-1)
        assert sizes.graph == 8  # the cosine's argument
        return Plan(4, None)

    return (RecomputedSteps(NOTHING, step, steps, CPU, plan, choose, **options), ran, weight)


def gradient(steps: int) -> float:
    x, total, w = torch.zeros((), dtype=torch.float64), 0.0, torch.ones((), dtype=torch.float64)
    w.requires_grad_()
    for _ in range(steps):
        x = torch.sin(x + w)
        total = total + x
    return float(torch.autograd.grad(total, w)[0])


@pytest.mark.parametrize("kept", [None, 0, 1, 2, 3, 7, 27])
@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_no_step_runs_more_often_than_the_plan_says(length, kept):
    steps = 32
    running, ran, weight = counted_steps(steps, Plan(length, kept))
    _, total = running.run(0, 0, steps, (torch.zeros((), dtype=torch.float64), None), None)
    assert ran == list(range(steps))
    total.backward()
    assert float(weight.grad) == pytest.approx(gradient(steps), rel=1e-12)
    again = -(-steps // length) - 1
    passed = advances(again, again - 1 if kept is None else min(kept, again - 1))
    assert len(ran) <= steps + (steps - length) + length * passed
    if steps % length == 0:
        assert len(ran) == steps + (steps - length) + length * passed


def test_the_first_steps_are_measured():
    running, ran, weight = counted_steps(12, None)
    _, total = running.run(0, 0, 12, (torch.zeros((), dtype=torch.float64), None), None)
    assert ran == [0, 1, 2, -1, *range(3, 12)]
    ran.clear()
    total.backward()
    assert ran == [4, 5, 6, 7, 3, 0, 1, 2]
    assert float(weight.grad) == pytest.approx(gradient(12), rel=1e-12)


def test_rewinding_puts_state_and_generators_back():
    drawn: list[Tensor] = []

    def step(t: int, carry: Any, counted: bool) -> tuple[Any, Tensor]:
        drawn.append(torch.rand(()))
        return (carry[0] + 1, None), carry[0]

    running = RecomputedSteps(
        NOTHING, step, 9, CPU, Plan(4, None), lambda sizes: Plan(1, None), {3}
    )
    running.run(0, 0, 6, (torch.zeros(()), None), None)
    carry = running.rewind(3)
    assert carry[0] == 3
    running.run(3, 6, 9, carry, None)
    assert torch.equal(torch.stack(drawn[3:6]), torch.stack(drawn[6:9]))
    assert len(set(map(float, drawn))) == 9


def test_memory_counts_a_storage_once():
    whole = torch.zeros(10)
    assert memory([whole, whole[2:], torch.zeros(3)]) == 40 + 12
