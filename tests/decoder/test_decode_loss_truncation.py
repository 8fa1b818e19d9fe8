"""TBPTT(k1, k2) against its definition: every window re-run from a detached state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import decode, make_decoder, relative_distance
from torch import nn

import accumext

BATCH, VOCABULARY = 3, 13
EXACT = 1e-12  # relative, float64: two orders of summation
PERIODS = [
    (1, 1),
    (1, 2),
    (1, 7),
    (2, 2),
    (2, 5),
    (3, 4),
    (4, 8),
    (5, 11),
    (8, 8),
    (20, 20),
    (4, 50),
]


@pytest.mark.parametrize("steps", [1, 8, 17, 35])
@pytest.mark.parametrize("periods", PERIODS, ids=lambda p: f"k1={p[0]},k2={p[1]}")
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_decode_loss_truncates_by_the_definition(
    periods: tuple[int, int], steps: int, feedback: str
) -> None:
    decoder = make_decoder("lstm_cell", tied=True)
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    lengths = torch.randint(1, steps + 1, (BATCH,))
    k1, k2 = periods
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
        feedback=feedback, k1=k1, k2=k2, lengths=lengths,
    )  # fmt: skip
    live = torch.arange(steps)[:, None] < lengths
    losses, divisor, _ = decode(decoder, targets, out.inputs, live, windows=periods)
    expected = losses.sum() / divisor
    torch.testing.assert_close(out.loss, expected, rtol=EXACT, atol=EXACT)
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected))
    assert distance < EXACT
    assert not any(s.requires_grad for s in out.state)


@pytest.mark.filterwarnings("ignore:decode_loss. k1=1 has no effect without k2")
def test_truncation_matters() -> None:
    """The gradients of k2 = 1, 2 and None differ, so that the tests above can fail."""
    decoder = make_decoder("gru_cell")
    targets = torch.randint(VOCABULARY, (12, BATCH))
    call = (decoder.embedding, decoder.cell, decoder.head, targets, decoder.state)
    grads = [
        decoder.gradients(accumext.decode_loss(*call, feedback="teacher", k1=1, k2=k2).loss)
        for k2 in (1, 2, None)
    ]
    assert relative_distance(grads[0], grads[1]) > 1e-3
    assert relative_distance(grads[1], grads[2]) > 1e-3


def test_k2_alone_means_k1_equal() -> None:
    decoder = make_decoder("gru_cell")
    targets = torch.randint(VOCABULARY, (12, BATCH))
    call = (decoder.embedding, decoder.cell, decoder.head, targets, decoder.state)
    alone = accumext.decode_loss(*call, feedback="greedy", k2=3)
    both = accumext.decode_loss(*call, feedback="greedy", k1=3, k2=3)
    for a, b in zip(decoder.gradients(alone.loss), decoder.gradients(both.loss), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("periods", [(2, 2), (2, 5)])
def test_dropout_is_the_same_in_overlapping_windows(periods: tuple[int, int]) -> None:
    decoder = make_decoder("lstm", dropout=0.5)
    targets = torch.randint(VOCABULARY, (9, BATCH))
    k1, k2 = periods
    torch.manual_seed(1)
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
        feedback="teacher", k1=k1, k2=k2,
    )  # fmt: skip
    torch.manual_seed(1)
    whole = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="teacher"
    )
    torch.testing.assert_close(out.loss, whole.loss, rtol=EXACT, atol=0)
    # with masks that differed between windows, the last step's own loss would have another gradient
    last = torch.zeros_like(targets).fill_(-100)
    last[-1] = targets[-1]
    short = {"feedback": "teacher", "inputs": out.inputs}
    torch.manual_seed(1)
    cut = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, last, decoder.state, k1=1, k2=9, **short
    )
    torch.manual_seed(1)
    exact = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, last, decoder.state, **short
    )
    assert relative_distance(decoder.gradients(cut.loss), decoder.gradients(exact.loss)) < EXACT


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
