"""The memory of a rollout: of segments, of a budget, and of a graph that is kept if it fits."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import relative_distance
from support.rollouts import EXACT, free, gru, plain_gru, zeros
from torch import Tensor, nn

import accumext
from accumext._peak_memory import peak_memory
from accumext.tensors.torch_private import saved_tensors_are_hooked

WIDE, ROWS, STEPS = 64, 32, 64


def wide_rollout(steps: int = STEPS, **options: Any) -> Callable[[], None]:
    cell = nn.GRUCell(WIDE, WIDE)
    for p in cell.parameters():
        p.grad = torch.zeros_like(p)
    series = torch.randn(steps, ROWS, WIDE)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    start, state = torch.zeros(ROWS, WIDE), torch.zeros(ROWS, WIDE)

    def run() -> None:
        out = accumext.rollout(
            step, state, steps, loss=lambda x, t: F.mse_loss(x, series[t]), start=start, **options
        )
        out.loss.backward()

    return run


STATE = ROWS * WIDE * 4
GRAPH = STATE * 7  # of a step: as measured with everything kept
GRADIENTS = 3 * 2 * 3 * WIDE * WIDE * 4  # of both weights, of a step and summed


def test_the_peak_is_that_of_states_and_a_segment():
    assert peak_memory(wide_rollout(checkpoint=STEPS)) == pytest.approx(STEPS * GRAPH, rel=0.1)
    peak = peak_memory(wide_rollout(checkpoint=16))
    assert peak - GRADIENTS < 1.15 * (STEPS * STATE + 16 * GRAPH)


def test_the_peak_is_that_of_twice_the_states_if_the_graph_does_not_fit():
    with free(4 * 30 * GRAPH):
        assert peak_memory(wide_rollout()) - GRADIENTS < 1.15 * (2 * STEPS * STATE + 12 * GRAPH)


@pytest.mark.parametrize("graphs", [6, 30])
def test_a_budget_is_kept_to_and_used(graphs):
    budget = int(graphs * GRAPH)
    peak = peak_memory(wide_rollout(memory_budget=budget))
    assert 0.75 * budget < peak < 1.05 * budget + GRADIENTS


def test_what_a_segment_has_left_is_freed_before_the_next():
    """A gradient for the start alone leaves what the nodes above the weight alone have saved."""
    weight, start = torch.ones(ROWS, WIDE).requires_grad_(), torch.ones(ROWS, WIDE).requires_grad_()

    def run() -> None:
        call = {
            "loss": lambda x, t: x.mean() + weight.exp().sum(),
            "start": start,
            "checkpoint": 32,
        }
        out = accumext.rollout(lambda x, _: (x * weight, None), None, STEPS, **call)
        torch.autograd.grad(out.loss, [start])

    # the last segment of the forward pass is not freed either; then two tensors a step
    assert peak_memory(run) < 3.5 * 32 * STATE


# --- a graph that is kept -------------------------------------------------------------------------


def test_whether_steps_run_again():
    _, step, call = gru(200)
    run = partial(accumext.rollout, step, zeros(), 200, **call)
    assert not run().recomputed
    assert not run(checkpoint=200).recomputed
    assert run(checkpoint=199).recomputed
    assert run(memory_budget=10**8).recomputed  # the steps that are measured
    assert not accumext.rollout(step, zeros(), 0, **call).recomputed
    with torch.no_grad():
        assert not run(checkpoint=2).recomputed
    with free(0):
        assert run().recomputed
    with free(10**7):
        assert not run().recomputed
    with torch.autograd.graph.save_on_cpu():
        assert run().recomputed


def test_few_steps_are_measured():
    """The others run without hooks, which would take time."""
    _, step, call = gru(100)
    hooked, calls = [], itertools.count()

    def watched(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if (at := next(calls)) is not None and saved_tensors_are_hooked():
            hooked.append(at)
        return step(x, h)

    assert not accumext.rollout(watched, zeros(), 100, **call).recomputed
    assert hooked == [0, 1, 2, 12, 13, 56, 57]


@pytest.mark.parametrize("graphs", [0.9, 1.1])
def test_a_graph_is_kept_if_it_takes_a_quarter_of_the_free_memory(graphs):
    with free(int(4 * graphs * STEPS * GRAPH)):
        peak = peak_memory(wide_rollout())
    if graphs > 1:
        assert peak == pytest.approx(STEPS * GRAPH, rel=0.1)
    else:
        assert peak < 0.7 * STEPS * GRAPH


@pytest.mark.parametrize("hidden", [False, True])
def test_a_graph_that_grows_stays_within_its_share(hidden):
    """Each step attends to all states before it, in the state or in a list of its own."""
    steps, width = 100, 32
    mix = nn.Linear(width, width)
    seen: list[Tensor] = []

    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        if hidden:
            seen.append(x)
            cache = torch.stack(seen, 1)
        else:
            cache = torch.cat([cache, x[:, None]], 1)
        x = torch.tanh(mix(F.scaled_dot_product_attention(x[:, None], cache, cache)[:, 0]))
        return x, cache[:, :1] if hidden else cache

    def run() -> list[Tensor]:
        seen.clear()
        mix.zero_grad()
        torch.manual_seed(0)
        start = torch.randn(8, width)
        call = {"loss": lambda x, t: x.square().mean(), "start": start}
        out = accumext.rollout(step, start[:, None], steps, **call)
        out.loss.backward()
        found.append((out.recomputed, mix.weight.grad.clone()))
        return []

    found: list[Any] = []
    whole = peak_memory(run)  # about steps ** 2 / 2 states
    with free(whole):  # a quarter of it is the share
        peak = peak_memory(run)
    assert [again for again, _ in found] == [False, True]
    torch.testing.assert_close(found[1][1], found[0][1])
    if not hidden:
        assert peak < 0.8 * whole


def test_inside_of_a_checkpoint_the_decision_does_not_depend_on_free_memory():
    """torch.utils.checkpoint counts the tensors that are saved when it runs a function again."""
    cell, step, call = gru()
    run = lambda h: accumext.rollout(step, h, 20, **call).loss  # noqa: E731
    expected = torch.autograd.grad(run(zeros()), [*cell.parameters()])
    loss = torch.utils.checkpoint.checkpoint(run, zeros(), use_reentrant=False)
    with free(0):
        found = torch.autograd.grad(loss, [*cell.parameters()])
    assert relative_distance(found, expected) < EXACT


@pytest.mark.parametrize("inner", [None, 0])
@pytest.mark.parametrize("outer", [None, 0])
def test_a_rollout_inside_of_a_rollout(outer, inner):
    cell, step, call = gru()
    run = lambda h, **options: accumext.rollout(step, h, 20, **call, **options).loss  # noqa: E731

    def steps(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        with free(inner):
            x = torch.tanh(x + run(h))
        return x, h / 2 + x

    def of_plain(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(x + plain_gru(step, h, 20, call)[0])
        return x, h / 2 + x

    loss, _ = plain_gru(of_plain, zeros(), 20, call)
    expected = torch.autograd.grad(loss, [*cell.parameters()])
    with free(outer):
        loss = accumext.rollout(steps, zeros(), 20, **call).loss
    assert relative_distance(torch.autograd.grad(loss, [*cell.parameters()]), expected) < EXACT


def test_rollouts_inside_of_a_rollout_are_not_larger_than_those_measured():
    """Each of them would be small enough to be kept, and all together four times the share."""
    cell = nn.GRUCell(WIDE, WIDE)
    inner: list[bool] = []

    def one(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        out = accumext.rollout(one, h, STEPS, loss=lambda x, t: x.square().mean(), start=x)
        inner.append(out.recomputed)
        return out.output, out.state

    call = {"loss": lambda x, t: x.square().mean(), "start": torch.zeros(ROWS, WIDE)}
    out = accumext.rollout(step, torch.zeros(ROWS, WIDE), 5, **call)
    assert not out.recomputed
    assert all(inner)
