"""Windows replayed from a graph: its buffers, with a stand-in for the capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.decode_oracle import decode, make_decoder

import accumext
from accumext.decoder import _cuda_graph, _decode_loss

STEPS, BATCH, VOCABULARY = 17, 3, 13

Body = Callable[[], None]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let calls on the CPU go through graphs; returns how often each was replayed.

    As in a graph, capturing computes nothing, and only what lies in its buffers is seen later.
    """
    replays: list[int] = []

    def capture(body: Body, device: torch.device) -> Body:
        index = len(replays)
        replays.append(0)

        def replay() -> None:
            replays[index] += 1
            body()

        return replay

    checked = _decode_loss.check_arguments

    def on_a_gpu(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(checked(*args, **kwargs), cuda_graph=True)

    monkeypatch.setattr(_cuda_graph, "capture", capture)
    monkeypatch.setattr(_decode_loss, "check_arguments", on_a_gpu)
    return replays


@pytest.mark.parametrize("kind", ["gru_cell", "lstm", "rnn_relu"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "call",
    [
        {"feedback": "greedy"},
        {"feedback": "sample"},
        {"feedback": "scheduled", "teacher_forcing": 0.5},
        {"feedback": "greedy", "k1": 3, "k2": 5},
        {"feedback": torch.arange(STEPS * BATCH).view(STEPS, BATCH) % 2 == 0},
    ],
    ids=lambda call: "mask" if isinstance(call["feedback"], torch.Tensor) else call["feedback"],
)
def test_replayed_windows_are_the_same(
    captures: list[int],
    kind: str,
    dropout: float,
    call: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "cell" in kind and dropout:
        pytest.skip("a cell has no dropout")
    model = make_decoder(kind, dropout=dropout)
    targets = torch.randint(VOCABULARY, (STEPS, BATCH))
    call = {**call, "memory_budget": VOCABULARY * 8 * (BATCH + 4 * BATCH)}  # four steps a window
    results = []
    for graphs in (True, False):
        if not graphs:
            monkeypatch.undo()
        torch.manual_seed(3)
        out = accumext.decode_loss(
            model.embedding, model.cell, model.head, targets, model.state, **call
        )
        results.append((out, model.gradients(out.loss)))
    (out, gradients), (expected, usual) = results
    if call["feedback"] == "scheduled":  # its last steps may need no feedback
        assert sum(captures) >= 1
    else:
        assert captures == [3]  # of five windows, the first and the last are not replayed
    assert torch.equal(out.tokens, expected.tokens)
    assert torch.equal(out.inputs, expected.inputs)
    assert torch.equal(out.loss, expected.loss)
    for mine, theirs in zip(gradients, usual, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("feedback", "replays"),
    [("greedy", 2), ((torch.arange(16) % 8 < 2)[:, None].expand(16, BATCH), 0)],
    ids=["whole", "stretches"],
)
def test_a_last_window_is_not_replayed(
    captures: list[int], feedback: str | torch.Tensor, replays: int
) -> None:
    """Of four whole windows, nor of a stretch of six steps before a stretch that is taught."""
    model = make_decoder("gru_cell")
    targets = torch.randint(VOCABULARY, (16, BATCH))
    budget = VOCABULARY * 8 * (BATCH + 4 * BATCH)  # four steps a window
    out = accumext.decode_loss(
        model.embedding, model.cell, model.head, targets, model.state, feedback=feedback,
        memory_budget=budget,
    )  # fmt: skip
    assert sum(captures) == replays
    losses, divisor, logits = decode(model, targets, out.inputs)
    assert torch.equal(out.tokens, logits.argmax(-1))
    expected = losses.sum() / divisor
    torch.testing.assert_close(out.loss, expected.detach(), rtol=1e-12, atol=0)
    for mine, theirs in zip(model.gradients(out.loss), model.gradients(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_row_that_ends_in_a_replayed_window_stays_ended(captures: list[int]) -> None:
    """Without dropping rows: a GPU does not count the live ones."""
    tape_rows = STEPS
    live = torch.ones(tape_rows, BATCH, dtype=torch.bool)
    zeros = torch.zeros(tape_rows, BATCH, dtype=torch.int64)
    tape = _cuda_graph.Tape(
        [torch.zeros(tape_rows + 1, BATCH, 2)], zeros, zeros, zeros, zeros.clone(), None, live,
        None, None,
    )  # fmt: skip

    def body(window: _cuda_graph.Tape, steps: int) -> None:
        assert window.live is not None
        window.tokens[:steps] = 5
        window.live[2:, 1] = False

    graph = _cuda_graph.WindowGraph(tape, 4, body)
    graph.replay(tape, 3)
    expected = torch.ones(tape_rows, BATCH, dtype=torch.bool)
    expected[5:, 1] = False
    assert torch.equal(live, expected)
    assert tape.tokens[3:7].eq(5).all()
    assert not tape.tokens[:3].any()
    assert not tape.tokens[7:].any()


def test_graphs_are_for_gpus() -> None:
    model = make_decoder("gru_cell")
    targets = torch.randint(VOCABULARY, (STEPS, BATCH))
    with pytest.raises(ValueError, match=r"^decode_loss: cuda_graph must be False where"):
        accumext.decode_loss(
            model.embedding, model.cell, model.head, targets, feedback="greedy", cuda_graph=True
        )
    with pytest.raises(TypeError, match=r"^decode_loss: cuda_graph must be a bool"):
        accumext.decode_loss(
            model.embedding, model.cell, model.head, targets, feedback="greedy",
            cuda_graph=1,  # type: ignore[arg-type]
        )  # fmt: skip
