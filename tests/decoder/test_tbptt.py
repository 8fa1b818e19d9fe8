"""tbptt against its definition, and every wrong argument."""

# ruff: noqa: E501  (one contract to a line)

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import EXACT, PERIODS, TARGETS
from torch import nn

import accumext

STEPS, BATCH, VOCABULARY = 6, 3, 13
T, B, V, H = 4, 3, 7, 5
FEW = torch.arange(T * B).view(T, B) % V
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"step": 3}, TypeError, "step must be callable, got int"),
    ({"criterion": None}, TypeError, "criterion must be callable, got NoneType"),
    ({"backward": 1}, TypeError, "backward must be callable, got int"),
    ({"targets": FEW.int()}, TypeError, "targets must be an int64 tensor [T, B] or a floating-point tensor [T, B, ...], got an int32 tensor"),
    ({"targets": FEW.float()}, ValueError,
     "feedback must be 'teacher' where inputs or targets are floating-point, got 'greedy'. accumext.rollout feeds a model its own output"),
    ({"targets": FEW[0].float()}, ValueError, "targets must have shape [T, B, ...], got [3]"),
    ({"targets": FEW.float(), "feedback": FEW > 0}, ValueError,
     "feedback must be 'teacher' where inputs or targets are floating-point, got a bool tensor. accumext.rollout feeds a model its own output"),
    ({"targets": FEW.float(), "feedback": "teacher", "start": "a"}, TypeError, "start must be a number or a tensor [B, ...], got str"),
    ({"targets": FEW.float(), "feedback": "teacher", "start": torch.zeros(2)}, ValueError, "start must have shape [3], got [2]"),
    ({"feedback": "teacher", "inputs": torch.zeros(4, 2, 5)}, ValueError, "inputs must have shape [4, 3] in front, got [4, 2, 5]"),
    ({"targets": FEW.float(), "feedback": "teacher", "inputs": [1]}, TypeError, "inputs must be a tensor [T, B, ...], got list"),
    ({"targets": torch.zeros(3, 5), "state": FEW}, TypeError,
     "targets must be int64 tokens where the state is an int64 matrix, got a float32 tensor. Did you mean tbptt(step, targets, state)?"),
    ({"targets": (torch.zeros(3, 5),), "state": FEW}, TypeError,
     "targets must be an int64 tensor [T, B] or a floating-point tensor [T, B, ...], got tuple. Did you mean tbptt(step, targets, state)?"),
    ({"lengths": 1}, TypeError, "lengths must be an integer tensor [B] or a list of ints, got int"),
    ({"lengths": [1]}, ValueError, "lengths must have shape [3], got [1]"),
    ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths must have shape [3], got [2]"),
    ({"lengths": torch.tensor([1, 2, 9])}, ValueError, "lengths must be in [0, 4], got [1, 2, 9]"),
    ({"context": FEW}, TypeError, "context must be a tuple of tensors, got an int64 tensor"),
    ({"context": (1,)}, TypeError, "context[0] must be a tensor, got int"),
    ({"state": (torch.zeros(T, H), 0)}, ValueError,
     "targets must be [T, B] with B = 4, got [4, 3]. Did you mean targets.transpose(0, 1)?"),
    ({"state": torch.zeros(B, B, H), "lengths": [1, 2, 3]}, ValueError,
     "batch_dim must be given where dimensions 0 and 1 may both be the batch of 3, got a state of shape [3, 3, 5]"),
    ({"batch_dim": -1}, ValueError, "batch_dim must be at least 0, got -1"),
    ({"targets": FEW[0]}, ValueError, "targets must have shape [T, B], got [3]"),
    ({"k1": 0}, ValueError, "k1 must be at least 1, got 0"),
    ({"k1": np.bool_(True)}, TypeError, "k1 must be an int, got bool"),
    ({"k2": True}, TypeError, "k2 must be an int, got bool"),
    ({"start": np.int64(-1)}, ValueError, "start must be at least 0, got -1"),
    ({"k1": 3, "k2": 2}, ValueError, "k2 must be at least k1, got k1=3, k2=2"),
    ({"reduction": "none"}, ValueError, "reduction must be one of 'mean', 'sum', got 'none'"),
    ({"feedback": "best"}, ValueError,
     "feedback must be one of 'teacher', 'greedy', 'sample', 'scheduled', got 'best'"),
    ({"start": -1}, ValueError, "start must be at least 0, got -1"),
]  # fmt: skip


@pytest.mark.parametrize("what", ["state", "context", "input"])
@pytest.mark.parametrize(
    ("options", "read_again"),
    [
        ({"k1": 2}, []),
        ({"k1": 2, "k2": 4}, ["state", "context", "input"]),
        ({"k1": 2, "lengths": [6, 3, 0]}, ["state"]),
    ],
    ids=str,
)
def test_a_step_that_writes_into_its_tensors(
    what: str, options: dict[str, Any], read_again: list[str]
) -> None:
    """An error where they are read again."""
    linear = nn.Linear(5, 5)
    series = torch.randn(STEPS, BATCH, 5)

    def step(x: torch.Tensor, state: Any, seen: torch.Tensor) -> tuple[torch.Tensor, Any]:
        h, count = state
        h = torch.tanh(linear(x + h))
        {"state": count, "context": seen, "input": x}[what].add_(1)
        return h, (h, count)

    def squares(output: torch.Tensor, target: torch.Tensor, rows: Any = None) -> torch.Tensor:
        return (output - target).square().mean()

    state = (torch.zeros(BATCH, 5), torch.zeros(BATCH))
    call: dict[str, Any] = {
        "criterion": squares,
        "feedback": "teacher",
        "inputs": series,
        **options,
    }
    text = "tbptt: step must write into no tensor of its input, state or context, got a write"
    if what not in read_again:
        accumext.tbptt(step, series.clone(), state, context=(torch.zeros(BATCH),), **call)
        return
    with pytest.raises(RuntimeError, match=re.escape(text)):
        accumext.tbptt(step, series.clone(), state, context=(torch.zeros(BATCH),), **call)


def test_a_state_that_is_written_before_a_window_starts_from_it_is_an_error() -> None:
    weight = torch.ones(3, requires_grad=True)
    buffers, calls = [torch.zeros(1, 3) for _ in range(2)], []

    def step(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return h * weight, buffers[len(calls) % 2].copy_(h.detach() + x)

    text = "tbptt: step must write into no state of an earlier step, got a write"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        accumext.tbptt(
            step, torch.ones(6, 1, 3), torch.zeros(1, 3), criterion=lambda h, y: (h * y).sum(),
            feedback="teacher", k1=1, k2=4,
        )  # fmt: skip


def test_outputs_are_those_of_their_steps() -> None:
    """Also where the step returns the state that it writes into."""
    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h.add_(x * weight)
        return h, h

    series = torch.ones(4, 1, 3)
    result = accumext.tbptt(
        step,
        series,
        torch.zeros(1, 3),
        criterion=lambda h, y: (h * y).sum(),
        feedback="teacher",
        start=1,
        k1=4,
    )
    assert result.tokens[:, 0, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("periods", PERIODS)
def test_state_and_context_may_come_from_one_graph(periods: tuple[int, int]) -> None:
    """As the last state and the outputs of an encoder do."""
    decoder = make_decoder("gru_cell")
    encoder = nn.Linear(5, 5, dtype=torch.float64)
    source = torch.randn(BATCH, 5, dtype=torch.float64)
    leaves = [*encoder.parameters(), *decoder.cell.parameters()]

    def step(token: torch.Tensor, h: Any, memory: torch.Tensor) -> tuple[torch.Tensor, Any]:
        h = decoder.cell(decoder.embedding(token) + memory, h)
        return decoder.head(h), h

    k1, k2 = periods
    found = []
    for shared in (True, False):
        encoded = torch.tanh(encoder(source))
        other = encoded if shared else torch.tanh(encoder(source))
        accumext.tbptt(
            step, TARGETS, encoded * 2, criterion=F.cross_entropy, feedback="greedy", k1=k1, k2=k2,
            context=(other + 1,),
        )  # fmt: skip
        found.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    assert relative_distance(*found) < EXACT


def test_tbptt_keeps_what_only_early_windows_use() -> None:
    decoder = make_decoder("gru_cell")
    bonus = torch.randn(BATCH, VOCABULARY, dtype=torch.float64, requires_grad=True)

    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        h = decoder.cell(decoder.embedding(token), state[0])
        return decoder.head(h) + state[1], (h, torch.zeros_like(state[1]))

    grads = []
    for k1, k2 in ((1, 3), (6, 6)):
        bonus.grad = None
        accumext.tbptt(
            step, TARGETS, (decoder.state, bonus), criterion=F.cross_entropy, feedback="teacher",
            k1=k1, k2=k2,
        )  # fmt: skip
        grads.append(bonus.grad)
    assert grads[0].abs().sum() > 0
    assert relative_distance([grads[0]], [grads[1]]) < EXACT


@pytest.mark.parametrize(
    ("criterion", "kind", "text"),
    [
        (lambda z, y: F.cross_entropy(z, y, reduction="none"), ValueError,
         "criterion must return a 0-dim loss, got shape [3]. Take its mean() or sum()"),
        (lambda z, y: 3.0, TypeError, "criterion must return a tensor, got float"),
    ],
    ids=["rows", "number"],
)  # fmt: skip
def test_tbptt_criterion(criterion: Any, kind: type[Exception], text: str) -> None:
    decoder = make_decoder("gru_cell")

    def step(token: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = decoder.cell(decoder.embedding(token), h)
        return decoder.head(h), h

    with pytest.raises(kind, match=rf"^tbptt: {re.escape(text)}$"):
        accumext.tbptt(step, TARGETS, decoder.state, criterion=criterion)


def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    return F.one_hot(token, V).float().requires_grad_(), state


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[t[:60] for _, _, t in WRONG])
def test_tbptt(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    call = {"step": step, "targets": FEW, "state": None, "criterion": F.cross_entropy}
    accumext.tbptt(**call)
    with pytest.raises(kind, match=rf"^tbptt: {re.escape(text)}$"):
        accumext.tbptt(**{**call, **change})


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_tbptt_with_integers_of_numpy(kind: Any) -> None:
    cell, head = nn.GRUCell(V, H), nn.Linear(H, V)

    def recurrent(token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = cell(F.one_hot(token, V).float(), state)
        return head(state), state

    def gradient(number: Any) -> torch.Tensor:
        cell.weight_hh.grad = None
        accumext.tbptt(
            recurrent, FEW, torch.zeros(B, H), criterion=F.cross_entropy,
            k1=number(2), k2=number(3), start=number(4),
        )  # fmt: skip
        assert cell.weight_hh.grad is not None
        return cell.weight_hh.grad

    assert torch.equal(gradient(kind), gradient(int))


class Model(nn.Module):
    """The user's `model(decoder_input, decoder_hidden)`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5, dtype=torch.float64)
        self.cell = nn.LSTMCell(5, 5, dtype=torch.float64)
        self.head = nn.Linear(5, VOCABULARY, dtype=torch.float64)
        self.encoder = nn.Linear(4, 10, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def encode(self, source: torch.Tensor) -> dict[str, Any]:
        h, c = self.encoder(source).chunk(2, -1)
        return {"lstm": [h, c]}

    def forward(self, token: torch.Tensor, state: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        h, c = self.cell(self.embedding(token), tuple(state["lstm"]))
        return self.head(self.dropout(h)), {"lstm": [h, c]}


def by_definition(
    model: Model,
    targets: torch.Tensor,
    source: torch.Tensor,
    inputs: torch.Tensor,
    k1: int,
    k2: int,
) -> None:
    """Each window re-run from the detached state k2 steps back, one plain backward each."""
    states = [model.encode(source)]
    with torch.no_grad():
        for t in range(len(targets)):
            states.append(model(inputs[t], states[-1])[1])
    done = 0
    for end in [*range(k1, len(targets), k1), len(targets)]:
        first = done if k1 == k2 else max(0, end - k2)
        state = states[first] if first else model.encode(source)
        total = torch.zeros((), dtype=torch.float64)
        for t in range(first, end):
            logits, state = model(inputs[t], state)
            if t >= done:
                total = total + F.cross_entropy(logits, targets[t]) / len(targets)
        total.backward()
        done = end


@pytest.mark.parametrize("steps", [1, 8, 11])
@pytest.mark.parametrize("periods", PERIODS, ids=lambda p: f"k1={p[0]},k2={p[1]}")
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_tbptt_equals_the_definition(periods: tuple[int, int], steps: int, feedback: str) -> None:
    model = Model()
    targets, source = torch.randint(VOCABULARY, (steps, BATCH)), torch.randn(BATCH, 4).double()
    result = accumext.tbptt(
        model, targets, model.encode(source), criterion=F.cross_entropy, feedback=feedback,
        k1=periods[0], k2=periods[1],
    )  # fmt: skip
    actual = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fed = result.tokens if feedback == "greedy" else targets
    inputs = torch.cat([torch.zeros(1, BATCH, dtype=torch.int64), fed[:-1]])
    by_definition(model, targets, source, inputs, *periods)
    assert relative_distance(actual, [p.grad for p in model.parameters()]) < EXACT
    assert not result.loss.requires_grad
    assert not result.state["lstm"][0].requires_grad


def test_tbptt_and_decode_loss_are_the_same_truncation() -> None:
    model = Model()
    targets, source = torch.randint(VOCABULARY, (11, BATCH)), torch.randn(BATCH, 4).double()
    result = accumext.tbptt(
        model, targets, model.encode(source), criterion=F.cross_entropy, k1=2, k2=5
    )
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    state = tuple(model.encode(source)["lstm"])
    out = accumext.decode_loss(
        model.embedding, model.cell, model.head, targets, state, feedback="greedy", k1=2, k2=5
    )
    out.loss.backward()
    assert torch.equal(out.tokens, result.tokens)
    torch.testing.assert_close(out.loss.detach(), result.loss, rtol=EXACT, atol=0)
    assert relative_distance([p.grad for p in model.parameters()], expected) < EXACT


def test_tbptt_replays_dropout_where_windows_overlap() -> None:
    """One window over everything, and windows that reach back to the start: the same masks."""
    targets, source = torch.randint(VOCABULARY, (6, BATCH)), torch.randn(BATCH, 4).double()
    model = Model(dropout=0.5)
    grads = []
    for k1 in (6, 1):
        model.zero_grad()
        torch.manual_seed(2)
        accumext.tbptt(
            model, targets, model.encode(source), criterion=F.cross_entropy, feedback="teacher",
            k1=k1, k2=6,
        )  # fmt: skip
        grads.append([p.grad.clone() for p in model.parameters()])
    assert relative_distance(*grads) < EXACT


def test_tbptt_backward_is_the_users_and_memory_is_a_window() -> None:
    model = Model()
    targets, source = torch.randint(VOCABULARY, (10, BATCH)), torch.randn(BATCH, 4).double()
    alive: list[Any] = []
    seen: list[float] = []

    def step(token: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        logits, state = model(token, state)
        alive.append(logits.grad_fn)
        return logits, state

    def backward(loss: torch.Tensor) -> None:
        seen.append(float(loss.detach()))
        (loss * 8).backward()

    result = accumext.tbptt(
        step, targets, model.encode(source), criterion=F.cross_entropy, k1=5, backward=backward,
        reduction="sum",
    )  # fmt: skip
    assert len(seen) == 2
    assert float(result.loss) == pytest.approx(sum(seen), rel=EXACT)
    with pytest.raises(RuntimeError, match="freed"):
        alive[-1](torch.ones(BATCH, VOCABULARY, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(0, BATCH), (4, 0)])
def test_tbptt_of_no_steps_or_rows(shape: tuple[int, int]) -> None:
    result = accumext.tbptt(
        Model(), torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[1], 5),
        criterion=F.cross_entropy,
    )  # fmt: skip
    assert result.loss == 0
    assert result.tokens.shape == shape


# --- floating-point inputs and targets, lengths, context -------------------------------------------


class Forecaster(nn.Module):
    """An LSTM cell from numbers to numbers, whose state may have the batch in dimension 1."""

    def __init__(self, width: int = 2, outputs: int = 2) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, 4, dtype=torch.float64)
        self.head = nn.Linear(4, outputs, dtype=torch.float64)
        self.hidden = nn.Parameter(torch.randn(1, BATCH, 4, dtype=torch.float64))
        self.memory = nn.Parameter(torch.randn(BATCH, 4, dtype=torch.float64))

    def state(self) -> dict[str, Any]:
        return {"h": self.hidden * 1, "c": self.hidden * 2, "steps": torch.zeros(())}

    def context(self) -> tuple[torch.Tensor, ...]:
        return (torch.tanh(self.memory),)

    def forward(self, x: torch.Tensor, state: dict[str, Any], *memory: torch.Tensor) -> Any:
        h, c = self.cell(x, (state["h"][0], state["c"][0]))
        seen = h + sum(memory)
        return self.head(seen), {"h": h[None], "c": c[None], "steps": state["steps"] + 1}

    def taken(self) -> list[torch.Tensor]:
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters()]
        self.zero_grad()
        return found


def windows_by_hand(
    model: Forecaster, inputs: torch.Tensor, loss_of: Any, k1: int, k2: int,
    lengths: torch.Tensor | None = None, with_memory: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The sum over windows, each from a detached state, rows frozen where they have ended."""
    steps = len(inputs)

    def advance(t: int, state: Any) -> tuple[torch.Tensor, Any]:
        output, new = model(inputs[t], state, *(model.context() if with_memory else ()))
        if lengths is not None:
            live = (t < lengths)[None, :, None]
            new = {k: torch.where(live, new[k], state[k]) if k != "steps" else new[k] for k in new}
        return output, new

    states = [model.state()]
    for t in range(steps):
        states.append({k: v.detach() for k, v in advance(t, states[-1])[1].items()})
    total, done = torch.zeros((), dtype=torch.float64), 0
    for end in [*range(k1, steps, k1), steps]:
        first = done if k1 == k2 else max(0, end - k2)
        state = states[first] if first else model.state()
        for t in range(first, end):
            output, state = advance(t, state)
            if t >= done:
                total = total + loss_of(t, output)
        done = end
    return total / steps


@pytest.mark.parametrize("periods", [(1, 1), (2, 5), (3, 3), (11, 11), (2, 20)])
@pytest.mark.parametrize("given", ["inputs", "start", "nothing"])
def test_regression_is_teacher_forced(periods: tuple[int, int], given: str) -> None:
    model, targets = Forecaster(), torch.randn(11, BATCH, 2, dtype=torch.float64)
    first = {"start": torch.randn(BATCH, 2).double(), "nothing": torch.zeros(BATCH, 2).double()}
    if given == "inputs":
        inputs = torch.randn(11, BATCH, 2, dtype=torch.float64)
        call = {"inputs": inputs}
    else:
        inputs = torch.cat([first[given][None], targets[:-1]])
        call = {"start": first["start"]} if given == "start" else {}
    result = accumext.tbptt(
        model, targets, model.state(), criterion=F.mse_loss, feedback="teacher", k1=periods[0],
        k2=periods[1], **call,
    )  # fmt: skip
    actual = model.taken()
    outputs: list[torch.Tensor] = []

    def loss_of(t: int, output: torch.Tensor) -> torch.Tensor:
        outputs.append(output.detach())
        return F.mse_loss(output, targets[t])

    total = windows_by_hand(model, inputs, loss_of, *periods)
    total.backward()
    torch.testing.assert_close(result.loss, total.detach(), rtol=EXACT, atol=0)
    torch.testing.assert_close(result.tokens, torch.stack(outputs), rtol=EXACT, atol=EXACT)
    assert relative_distance(actual, model.taken()) < EXACT


def test_numbers_in_and_classes_out() -> None:
    model, targets = Forecaster(outputs=5), torch.randint(5, (7, BATCH))
    inputs = torch.randn(7, BATCH, 2, dtype=torch.float64)
    result = accumext.tbptt(
        model, targets, model.state(), criterion=F.cross_entropy, feedback="teacher",
        inputs=inputs, k1=2, k2=3,
    )  # fmt: skip
    actual, found = model.taken(), []

    def loss_of(t: int, output: torch.Tensor) -> torch.Tensor:
        found.append(output.argmax(-1))
        return F.cross_entropy(output, targets[t])

    windows_by_hand(model, inputs, loss_of, 2, 3).backward()
    assert torch.equal(result.tokens, torch.stack(found))
    assert relative_distance(actual, model.taken()) < EXACT


@pytest.mark.parametrize("periods", [(1, 1), (2, 5), (3, 3), (11, 11)])
@pytest.mark.parametrize("lengths", [[11, 4, 7], [5, 0, 2], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_rows_end_at_their_lengths(kind: str, lengths: list[int], periods: tuple[int, int]) -> None:
    ends = torch.tensor(lengths)
    numbers = kind == "numbers"
    model = Forecaster(outputs=2 if numbers else 5)
    inputs = torch.randn(11, BATCH, 2, dtype=torch.float64)
    targets = torch.randn(11, BATCH, 2).double() if numbers else torch.randint(5, (11, BATCH))
    if not numbers:
        targets[torch.arange(11)[:, None] >= ends] = 77  # anything may stand there

    def criterion(output: torch.Tensor, target: torch.Tensor, live: Any = None) -> torch.Tensor:
        if not numbers:
            assert live is None
            return F.cross_entropy(output, target)
        return (output - target).square().mean(1)[live].mean()

    def loss_of(t: int, output: torch.Tensor) -> torch.Tensor:
        live = t < ends
        if not live.any():
            return output.sum() * 0
        if numbers:
            return (output - targets[t]).square().mean(1)[live].mean()
        return F.cross_entropy(output[live], targets[t][live])

    result = accumext.tbptt(
        model, targets, model.state(), criterion=criterion, feedback="teacher", inputs=inputs,
        k1=periods[0], k2=periods[1], lengths=ends, batch_dim=1,
    )  # fmt: skip
    actual = model.taken()
    total = windows_by_hand(model, inputs, loss_of, *periods, lengths=ends)
    total.backward()
    torch.testing.assert_close(result.loss, total.detach(), rtol=EXACT, atol=EXACT)
    assert relative_distance(actual, model.taken()) < EXACT
    assert result.state["steps"] == 11
    ended = ends == 0
    assert torch.equal(result.state["h"][:, ended], model.hidden.detach()[:, ended])


@pytest.mark.parametrize("periods", [(1, 1), (2, 5), (3, 3), (11, 11)])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_context_keeps_its_graph_through_every_window(
    periods: tuple[int, int], scale: float
) -> None:
    model = Forecaster()
    inputs, targets = torch.randn(2, 11, BATCH, 2, dtype=torch.float64)
    accumext.tbptt(
        model, targets, model.state(), criterion=F.mse_loss, feedback="teacher", inputs=inputs,
        k1=periods[0], k2=periods[1], context=model.context(),
        backward=lambda loss: (loss * scale).backward(),
    )  # fmt: skip
    actual = model.taken()

    def loss_of(t: int, output: torch.Tensor) -> torch.Tensor:
        return scale * F.mse_loss(output, targets[t])

    windows_by_hand(model, inputs, loss_of, *periods, with_memory=True).backward()
    expected = model.taken()
    assert expected[-1].norm() > 0
    assert relative_distance(actual, expected) < EXACT


@pytest.mark.parametrize("where", ["state", "context"])
def test_a_tensor_that_is_given_twice_counts_twice_and_no_more(where: str) -> None:
    """In every window, as the sum of its two places."""
    place = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(5, 3, 2, dtype=torch.float64)
    weight = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def step(x: torch.Tensor, state: Any, *context: torch.Tensor) -> tuple[torch.Tensor, Any]:
        first, second = state
        new = torch.tanh(first @ weight + 2 * second + x)
        if context:
            new = new * context[0] + context[1].sin()
        return new, (new, first * second)

    def gradient(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        pair = one, two
        fixed = torch.full((3, 2), 0.5, dtype=torch.float64)
        accumext.tbptt(
            step, targets, pair if where == "state" else (fixed, fixed.clone()),
            context=() if where == "state" else pair, criterion=F.mse_loss, feedback="teacher",
            k1=1, k2=3,
        )  # fmt: skip
        assert place.grad is not None
        found, place.grad = place.grad, None
        return found

    torch.testing.assert_close(
        gradient(place, place), gradient(place * 1, place * 1), rtol=EXACT, atol=EXACT
    )
