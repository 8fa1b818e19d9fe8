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
    ({"targets": FEW.float()}, TypeError, "targets must be an int64 tensor [T, B], got a float32 tensor"),
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
         "criterion must return a 0-dim loss, got shape [3]"),
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


def test_tbptt_of_no_steps() -> None:
    result = accumext.tbptt(
        Model(), torch.zeros(0, BATCH, dtype=torch.int64), torch.zeros(BATCH, 5),
        criterion=F.cross_entropy,
    )  # fmt: skip
    assert result.loss == 0
    assert result.tokens.shape == (0, BATCH)
