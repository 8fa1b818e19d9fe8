"""rollout against the plain loop, every way of truncating it, and every wrong argument."""

# ruff: noqa: E501  (one contract to a line)

import gc
import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_oracle import relative_distance, truncated
from support.rollouts import BATCH, EXACT, SIZE, free, gru, plain_gru, zeros
from torch import Tensor, nn

import accumext
from accumext.recurrence import _truncation
from accumext.recurrence._states import tensors

WIDTH = 2
Loop = Callable[["World", int], tuple[Tensor, Any, Any]]


class World:
    """A small recurrent model with everything that a rollout may have, in float64."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.cell = nn.LSTMCell(WIDTH, SIZE, dtype=torch.float64)
        self.head = nn.Linear(SIZE, 2 * WIDTH, dtype=torch.float64)
        self.scale = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
        self.hidden = torch.randn(BATCH, SIZE, dtype=torch.float64, requires_grad=True)
        self.start = torch.randn(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
        self.encoded = torch.tanh(self.hidden * 2)  # closed over, with a graph of its own
        self.series = torch.randn(40, BATCH, WIDTH, dtype=torch.float64)
        self.dropout, self.masks = dropout, []  # of each step, or drawn
        self.calls = 0

    @property
    def leaves(self) -> list[Tensor]:
        modules = (*self.cell.parameters(), *self.head.parameters())
        return [*modules, self.scale, self.hidden, self.start]

    def state(self) -> Any:
        return (self.hidden, [self.hidden * 0.5, {"count": torch.zeros((), dtype=torch.int64)}])

    def step(self, x: dict[str, Tensor], state: Any) -> tuple[Any, Any]:
        self.calls += 1
        h, (c, at) = state
        h, c = self.cell(x["fed"] * self.scale, (h + 0.1 * self.encoded, c))
        h = h * self.masks[int(at["count"])] if self.masks else F.dropout(h, self.dropout)
        mean, spread = self.head(h).chunk(2, -1)
        return (mean, {"spread": torch.exp(0.1 * spread)}), (h, [c, {"count": at["count"] + 1}])

    def loss(self, output: Any, t: int) -> Tensor:
        mean, rest = output
        return ((mean - self.series[t]) ** 2 * rest["spread"]).mean() + 0.01 * t

    def feed(self, output: Any, t: int) -> dict[str, Tensor]:
        mean, rest = output
        return {"fed": mean * rest["spread"] + 0.1 * t}

    def first(self) -> dict[str, Tensor]:
        return {"fed": self.start * 1}

    def rollout(self, steps: int, **call: Any) -> accumext.RolloutOutput:
        given = {"loss": self.loss, "start": self.first(), "feed": self.feed, **call}
        return accumext.rollout(self.step, self.state(), steps, **given)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Of the leaves, which lose them; the graph that is closed over is made again."""
        loss.backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.leaves]
        for p in self.leaves:
            p.grad = None
        self.encoded = torch.tanh(self.hidden * 2)
        return found


def plain(
    world: World, steps: int, k1: int | None = None, k2: int | None = None, reduction: str = "mean",
    resets: Tensor | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The loop by its definition."""

    def anew(rows: Tensor, state: Any) -> Any:
        (h, (c, at)), (h_0, (c_0, _)) = state, world.state()
        return torch.where(rows[:, None], h_0, h), [torch.where(rows[:, None], c_0, c), at]

    def run(begin: int, end: int, carry: Any) -> tuple[list[Any], Any]:
        found = []
        for t in range(begin, end):
            if resets is not None and t > 0:
                carry = carry[0], anew(resets[t], carry[1])
            output, state = world.step(*carry)
            found.append((world.loss(output, t), output))
            carry = (world.feed(output, t), state)
        return found, carry

    found, (_, state) = truncated(run, (world.first(), world.state()), steps, k1, k2)
    losses, outputs = zip(*found)
    total = torch.stack(losses).sum()
    return (total / steps if reduction == "mean" else total), (outputs[-1], state)


@settings(deadline=None)
@given(
    st.integers(1, 12), st.sampled_from(["mean", "sum"]), st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 6), st.integers(0, 6), st.sampled_from([None, "tight", "wide"]),
    st.booleans(), st.sampled_from([None, 0, 20_000, 100_000]),
)  # fmt: skip
def test_any_rollout_is_the_plain_loop(steps, reduction, checkpoint, k1, more, budget, reset, left):
    world, k2 = World(), None if k1 is None else k1 + more
    resets = torch.rand(steps, BATCH) < 0.3 if reset else None
    loss, (output, state) = plain(world, steps, k1, k2, reduction, resets)
    expected = world.gradients(loss)
    bytes_ = {None: None, "tight": (checkpoint or 3) * 5000 + 30000, "wide": 10**7}[budget]
    with free(left):
        out = world.rollout(
            steps, k1=k1, k2=k2, reduction=reduction, checkpoint=checkpoint, memory_budget=bytes_,
            resets=resets,
        )  # fmt: skip
    if checkpoint is None and budget is None and left is None:
        assert not out.recomputed
    torch.testing.assert_close(out.loss, loss, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(
        tensors((out.output, out.state)), tensors((output, state)), rtol=EXACT, atol=EXACT
    )
    assert any(t.requires_grad for t in tensors(out.state)) == (k2 is None)
    assert relative_distance(world.gradients(out.loss), expected) < EXACT


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 5), st.integers(1, 12))
def test_dropout_is_replayed(steps, k1, more, checkpoint):
    """The plain loop has the masks of one pass in every window."""
    world = World(dropout=0.5)
    for k2 in (None, k1 + more):
        torch.manual_seed(1)
        world.masks = [F.dropout(torch.ones_like(world.hidden), 0.5) for _ in range(steps)]
        after = torch.rand(())
        loss, _ = plain(world, steps, k1, k2)
        expected = world.gradients(loss)
        world.masks = []
        torch.manual_seed(1)
        call = {} if k2 is None else {"k1": k1, "k2": k2}
        out = world.rollout(steps, checkpoint=None if checkpoint > 9 else checkpoint, **call)
        assert torch.equal(after, torch.rand(()))  # the generator is where the loop leaves it
        torch.testing.assert_close(out.loss, loss, rtol=EXACT, atol=EXACT)
        torch.manual_seed(99)
        state = torch.get_rng_state()
        assert relative_distance(world.gradients(out.loss), expected) < EXACT
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reset", [False, True], ids=["", "resets"])
def test_the_expectation_over_all_cuts_is_the_exact_gradient(reset, monkeypatch):
    steps, mean = 5, 4
    world, resets = World(), torch.rand(5, BATCH) < 0.4 if reset else None
    exact = world.gradients(world.rollout(steps, resets=resets).loss)
    expected = [torch.zeros_like(g) for g in exact]
    spread = 0.0
    for pattern in itertools.product([False, True], repeat=steps - 1):
        kept = [1.0, *(0.0 if coin else 4 / 3 for coin in pattern)]
        factors = torch.tensor(kept, dtype=torch.float64)[:, None]
        monkeypatch.setattr(_truncation, "random_cuts", lambda *_, f=factors: f)
        out = world.rollout(steps, truncation="random", k2=mean, checkpoint=2, resets=resets)
        assert not any(t.requires_grad for t in tensors((out.state, out.output)))
        gradients = world.gradients(out.loss)
        chance = 0.25 ** sum(pattern) * 0.75 ** (steps - 1 - sum(pattern))
        for total, gradient in zip(expected, gradients, strict=True):
            total += chance * gradient
        spread = max(spread, relative_distance(gradients, exact))
    assert relative_distance(expected, exact) < EXACT
    assert spread > 1e-3


def test_random_cuts_are_drawn_from_the_global_generator():
    cell, step, call = gru()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = accumext.rollout(step, zeros(), 20, truncation="random", k2=3, **call)
        found.append(torch.autograd.grad(out.loss, list(cell.parameters())))
    assert relative_distance(found[0], found[1]) == 0
    assert relative_distance(found[0], found[2]) > 1e-3


@pytest.mark.parametrize("checkpoint", [None, 1, 3, 20])
def test_the_output_is_fed_and_a_state_may_be_none(checkpoint):
    cell, _, call = gru()

    def step(x: Tensor | None, state: None) -> tuple[Tensor, None]:
        x = torch.ones(BATCH, SIZE, dtype=torch.float64) if x is None else x
        return cell(x, x), None

    loss, _ = plain_gru(step, None, 20, {**call, "start": None})
    expected = torch.autograd.grad(loss, list(cell.parameters()))
    out = accumext.rollout(step, None, 20, loss=call["loss"], checkpoint=checkpoint)
    assert out.state is None
    actual = torch.autograd.grad(out.loss, list(cell.parameters()))
    assert relative_distance(actual, expected) < EXACT


def test_a_loss_that_ignores_the_output():
    _, step, call = gru()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = accumext.rollout(
        step, zeros(), 9, loss=lambda x, t: weight * t, checkpoint=2, start=call["start"]
    )
    out.loss.backward()
    assert out.loss == 4
    assert weight.grad == 4
    constant = accumext.rollout(
        step, zeros(), 9, loss=lambda x, t: torch.tensor(2.0), start=call["start"]
    )
    assert constant.loss == 2
    assert not constant.loss.requires_grad


def test_no_steps():
    state, start = zeros(), zeros()
    call = {"loss": lambda x, t: x.sum(), "start": start}
    out = accumext.rollout(lambda x, h: (x, h), {"h": state}, 0, **call)
    assert out.loss == 0
    assert out.output is None
    assert out.state["h"] is state
    out.loss.backward()
    assert not state.grad.any()
    assert not start.grad.any()


def test_gradients_go_on_from_the_last_state_and_output_under_any_factor():
    cell, step, call = gru()
    h = zeros()
    leaves = [*cell.parameters(), h, call["start"]]
    loss, last = plain_gru(step, h, 20, call)
    expected = torch.autograd.grad(3 * loss + last.square().sum(), leaves)
    first = accumext.rollout(step, h, 8, checkpoint=3, reduction="sum", **call)
    then = {"loss": lambda x, t: call["loss"](x, t + 8), "start": first.output}
    second = accumext.rollout(step, first.state, 12, checkpoint=4, reduction="sum", **then)
    total = 3 * (first.loss + second.loss) / 20 + second.state.square().sum()
    assert relative_distance(torch.autograd.grad(total, leaves), expected) < EXACT


@pytest.mark.parametrize("budget", [None, 6000])
def test_a_graph_may_be_walked_twice_and_hooks_run_once(budget):
    cell, step, call = gru()
    seen: list[Tensor] = []
    hook = cell.weight_hh.register_hook(seen.append)
    plain_gru(step, zeros(), 20, call)[0].backward()
    expected = [p.grad.clone() for p in cell.parameters()]
    cell.zero_grad()
    out = accumext.rollout(
        step, zeros(), 20, checkpoint=4, memory_budget=budget and 4 * 2000 + budget, **call
    )
    out.loss.backward(retain_graph=True)
    out.loss.backward()
    assert relative_distance([p.grad / 2 for p in cell.parameters()], expected) < EXACT
    assert len(seen) == 3
    hook.remove()


def test_without_a_graph_the_steps_just_run():
    world = World()
    with torch.no_grad():
        out = world.rollout(9, k1=2, k2=4, loss=lambda x, t: world.loss(x, t) * world.scale.sum())
        assert world.calls == 9
        loss = plain(world, 9)[0] * world.scale.sum()
    assert not out.loss.requires_grad
    torch.testing.assert_close(out.loss, loss, rtol=EXACT, atol=0)


def test_all_is_freed_with_the_result():
    _, step, call = gru()
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"checkpoint": 3}, {"k1": 2, "k2": 5}):
            outputs: list[Any] = []

            def watched(x: Tensor, h: Tensor, kept: list[Any] = outputs) -> tuple[Tensor, Tensor]:
                x, h = step(x, h)
                kept.append(weakref.ref(h))
                return x, h

            out = accumext.rollout(watched, zeros(), 20, **options, **call)
            out.loss.backward()
            del out
            assert not [ref for ref in outputs if ref() is not None]
    finally:
        gc.enable()


WAYS: list[dict[str, Any]] = [
    {"checkpoint": 3}, {"memory_budget": 30_000}, {"checkpoint": 3, "k2": 4},
    {"checkpoint": 3, "k1": 2, "k2": 5},
]  # fmt: skip


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_what_has_changed_since_is_an_error(options):
    """Also parameters that no graph keeps: of a sum autograd saves nothing, and the steps that run
    again read its parts again."""
    cell, step, call = gru()
    early = torch.ones(SIZE, dtype=torch.float64, requires_grad=True)
    state = torch.zeros(BATCH, SIZE, dtype=torch.float64)

    def loss(x: Tensor, t: int) -> Tensor:
        return (x * early).mean() if t < 3 else x.mean()

    for changed in (early, cell.bias_ih, cell.bias_hh, state):
        out = accumext.rollout(
            (lambda x, h: (cell(x, x + h), h + 1)) if changed is state else step, state, 20,
            **{**options, **call} | ({"loss": loss} if changed is early else {}),
        )  # fmt: skip
        with torch.no_grad():
            changed.add_(0.5)
        text = "rollout: parameters, inputs and states must be those of the forward pass until the backward pass has run"
        with pytest.raises(RuntimeError, match=rf"^{text}"):
            out.loss.backward()


def test_a_kept_graph_and_what_has_changed_since():
    """As in the plain loop: an error if the backward pass needs it, without effect if not."""
    cell, step, call = gru()
    expected = torch.autograd.grad(plain_gru(step, zeros(), 20, call)[0], [*cell.parameters()])
    for name, parameter in cell.named_parameters():
        out = accumext.rollout(step, zeros(), 20, **call)
        assert not out.recomputed
        with torch.no_grad():
            before = parameter.clone()
            parameter.add_(0.5)
        if name.startswith("weight"):
            with pytest.raises(
                RuntimeError, match=r"modified by an inplace operation|must be those"
            ):
                out.loss.backward()
        else:
            found = torch.autograd.grad(out.loss, [*cell.parameters()])
            assert relative_distance(found, expected) < EXACT
        with torch.no_grad():
            parameter.copy_(before)


@pytest.mark.parametrize("options", WAYS[::3], ids=str)
def test_steps_may_renormalise_an_embedding_that_they_look_up(options):
    """`max_norm` writes into the parameter, in the forward pass and in the replays alike."""
    torch.manual_seed(0)
    embedding = nn.Embedding(20, SIZE, max_norm=0.5, dtype=torch.float64)
    cell, _, call = gru()
    weight = embedding.weight.detach().clone()
    grads = []

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        h, t = state
        h = cell(x + embedding(torch.full((BATCH,), t)), h)
        return h, (h, t + 1)

    for chosen in (options, {**options, "checkpoint": 20}):
        with torch.no_grad():
            embedding.weight.copy_(weight)
        out = accumext.rollout(step, (zeros(), 0), 20, **chosen, **call)
        grads.append(torch.autograd.grad(out.loss, [embedding.weight, *cell.parameters()]))
    assert relative_distance(*grads) < EXACT


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": 2}, {"checkpoint": 2, "memory_budget": 7000}, {"k1": 1, "k2": 3}],
    ids=str,
)
def test_a_replay_is_under_the_same_autocast(options, inside):
    """Whether the backward pass runs inside of it or not."""
    cell, state = nn.Linear(SIZE, SIZE), torch.zeros(BATCH, SIZE)
    call = {"start": torch.randn(BATCH, SIZE), "loss": lambda x, t: x.float().square().mean()}

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(cell(x) + h)
        return h, h

    gradients = []
    for total_of in (
        lambda: accumext.rollout(step, state, 9, **call, **options).loss,
        lambda: plain_gru(step, state, 9, call)[0],
    ):
        with torch.autocast("cpu", torch.bfloat16):
            total = total_of()
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                gradients += torch.autograd.grad(total, cell.weight)
    found, whole = gradients
    if "k1" in options:
        assert found.norm() > 0.5 * whole.norm() > 0
    else:
        torch.testing.assert_close(found, whole, rtol=2**-6, atol=2**-10)


@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": 2}, {"checkpoint": 2, "memory_budget": 12000}, {"k1": 2, "k2": 3}],
    ids=str,
)
def test_a_step_may_write_into_its_containers(options):
    cell, step, call = gru()

    def writing(x: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        x, state["h"] = step(x, state["h"])
        state["seen"].append(state["h"])
        return x + 0.1 * state["seen"][0], {"h": state["h"], "seen": state["seen"][-1:]}

    def run(**options: Any) -> tuple[Tensor, ...]:
        h = torch.zeros(BATCH, SIZE, dtype=torch.float64)
        state = {"h": h, "seen": [h + 1]}
        out = accumext.rollout(writing, state, 9, **options, **call)
        assert len(state["seen"]) == 1
        assert state["h"] is h
        return torch.autograd.grad(out.loss, list(cell.parameters()))

    windows = {name: options[name] for name in ("k1", "k2") if name in options}
    assert relative_distance(run(**options), run(checkpoint=9, **windows)) < EXACT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_a_compiled_step():
    cell, step, call = gru()
    memory = torch.tanh(call["start"] * 2)  # closed over, with a graph

    def eager(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return step(x + 0.1 * memory, h)

    leaves = [*cell.parameters(), call["start"]]
    loss, _ = plain_gru(eager, zeros(), 20, call)
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    compiled = torch.compile(eager, backend="aot_eager")
    out = accumext.rollout(compiled, zeros(), 20, checkpoint=4, **call)
    assert relative_distance(torch.autograd.grad(out.loss, leaves), expected) < EXACT


# --- arguments ------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"step": 3}, TypeError, "step must be callable, got int"),
    ({"loss": None}, TypeError, "loss must be callable, got NoneType"),
    ({"feed": 3}, TypeError, "feed must be callable or None, got int"),
    ({"state": {1}}, TypeError, "state must nest tensors in tuples, lists, dicts and dataclasses, got set"),
    ({"steps": -1}, ValueError, "steps must be at least 0, got -1"),
    ({"k1": 3, "k2": 2}, ValueError, "k2 must be at least k1, got k1=3, k2=2"),
    ({"truncation": "random"}, ValueError, "k2 must be at least 2, the mean of steps between random cuts, got None"),
    ({"checkpoint": 0}, ValueError, "checkpoint must be at least 1, got 0"),
    ({"memory_budget": 0}, ValueError, "memory_budget must be at least 1, got 0"),
    ({"reduction": "none"}, ValueError, "reduction must be one of 'mean', 'sum', got 'none'"),
    ({"step": lambda x, h: x}, TypeError, "step must return (output, state), got a float64 tensor"),
    ({"step": lambda x, h: ({1}, h), "loss": lambda x, t: torch.zeros(())}, TypeError, "output must nest tensors in tuples, lists, dicts and dataclasses, got set"),
    ({"feed": lambda x, t: {1}}, TypeError, "what feed returns must nest tensors in tuples, lists, dicts and dataclasses, got set"),
    ({"loss": lambda x, t: 3.0}, TypeError, "loss must return a tensor, got float. Leave out .item(), whose result has no graph"),
    ({"loss": lambda x, t: x}, ValueError, "loss must return a 0-dim loss, got shape [3, 4]. Take its mean() or sum()"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[t[:60] for _, _, t in WRONG])
def test_wrong_arguments(change, kind, text):
    _, step, call = gru()
    given = {"step": step, "state": zeros(), "steps": 3, **call}
    accumext.rollout(**given)
    with pytest.raises(kind, match=rf"^rollout: {re.escape(text)}$"):
        accumext.rollout(**{**given, **change})


def test_other_errors():
    _, step, call = gru()
    text = r"^rollout: memory_budget must hold \d+ bytes: a segment's graph, and what it starts from, got 100$"
    with pytest.raises(ValueError, match=text):
        accumext.rollout(step, zeros(), 20, memory_budget=100, **call)
    text = "rollout: start must be given, the input of step 0, if step reads it, got None"
    with pytest.raises(TypeError, match=text):
        accumext.rollout(lambda x, s: (x + s, s), zeros(), 3, loss=lambda x, t: x.sum())
    with pytest.warns(UserWarning, match="rollout: k1=2 has no effect without k2"):
        accumext.rollout(step, zeros(), 3, k1=2, **call)
