"""Every wrong argument of decode_loss: the exact sentence, nothing changed. What is
doubtful: one warning that says what to type."""

# ruff: noqa: E501  (one contract to a line)

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support import decoding
from support.decode_oracle import decode, make_decoder, relative_distance
from support.decoding import EXACT, raises, run
from torch import nn

import accumext

T, B, V, H = 4, 3, 7, 5
TARGETS = torch.arange(T * B).view(T, B) % V
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"embedding": 3}, TypeError, "embedding must be an nn.Embedding or a floating-point tensor [V, E], got int"),
    ({"embedding": torch.zeros(3)}, ValueError, "embedding must have shape [V, E], got [3]"),
    ({"embedding": nn.Embedding(V, H, scale_grad_by_freq=True)}, ValueError,
     "embedding must not scale gradients by frequency, got scale_grad_by_freq"),
    ({"embedding": nn.Embedding(V, H + 1)}, ValueError, "embedding must have the cell's input size, 5, got 6"),
    ({"embedding": nn.Embedding(V - 1, H)}, ValueError,
     "embedding must have a row for each of the 7 words that can be fed back, got 6 rows"),
    ({"cell": 3}, TypeError, "cell must be a recurrent module or callable, got int"),
    ({"cell": nn.GRU(H, H, bidirectional=True)}, ValueError, "cell must have one direction, got bidirectional=True"),
    ({"cell": lambda x, s: (x[:1], s)}, ValueError, "cell must return an output of shape [3, 5], got [1, 5]"),
    ({"cell": lambda x, s: (3, s)}, TypeError, "cell must return (output, state) with a tensor output, got int"),
    ({"head": nn.Linear(H + 1, V)}, ValueError, "head must take the cell's output, 5 wide, got [7, 6]"),
    ({"head": 3}, TypeError, "head must be an nn.Linear or a pair (weight, bias), got int"),
    ({"head": (torch.zeros(V, H, dtype=torch.int64), None)}, TypeError,
     "head weight must be a floating-point tensor [V, H], got an int64 tensor"),
    ({"head": (torch.zeros(V), None)}, ValueError, "head weight must have shape [V, H] with V >= 1, got [7]"),
    ({"head": (torch.zeros(V, H), torch.zeros(V + 1))}, ValueError, "head bias must have shape [7], got [8]"),
    ({"targets": TARGETS.float()}, TypeError, "targets must be an int64 tensor [T, B], got a float32 tensor"),
    ({"targets": TARGETS[0]}, ValueError, "targets must have shape [T, B], got [3]"),
    ({"targets": TARGETS + 1}, ValueError, "targets must be in [0, 7), got 7"),
    ({"targets": TARGETS - 1}, ValueError, "targets must be in [0, 7), got -1"),
    ({"targets": TARGETS.to("meta")}, ValueError, "targets must be on the head's device, cpu, got meta"),
    ({"state": torch.zeros(B, H + 1)}, ValueError, "state must have shape [3, 5], got [3, 6]"),
    ({"cell": nn.LSTMCell(H, H), "state": torch.zeros(B, H)}, TypeError,
     "state must be a pair of tensors (h, c) for this cell, got a float32 tensor"),
    ({"cell": nn.LSTM(H, H, 2), "state": (torch.zeros(2, B, H), torch.zeros(1, B, H))}, ValueError,
     "state[1] must have shape [2, 3, 5], got [1, 3, 5]"),
    ({"feedback": "argmax"}, ValueError,
     "feedback must be one of 'teacher', 'greedy', 'sample', 'scheduled', got 'argmax'"),
    ({"feedback": torch.ones(T, B)}, TypeError, "feedback must be a word or a bool mask [T, B], got a float32 tensor"),
    ({"feedback": torch.ones(B, T, dtype=torch.bool)}, ValueError, "feedback must have shape [4, 3], got [3, 4]"),
    ({"start": V}, ValueError, "start must be in [0, 7), got 7"),
    ({"start": 1.0}, TypeError, "start must be an int or an int64 tensor [B], got float"),
    ({"start": torch.tensor([0, 1, -1])}, ValueError, "start must be in [0, 7), got -1"),
    ({"start": torch.tensor([0, 1])}, ValueError, "start must have shape [3], got [2]"),
    ({"inputs": TARGETS[:2]}, ValueError, "inputs must have shape [4, 3], got [2, 3]"),
    ({"inputs": TARGETS + 1}, ValueError, "inputs must be in [0, 7), got 7"),
    ({"teacher_forcing": 1.5}, ValueError, "teacher_forcing must be at most 1, got 1.5"),
    ({"teacher_forcing": float("nan")}, ValueError, "teacher_forcing must be at least 0, got nan"),
    ({"k1": 0}, ValueError, "k1 must be at least 1, got 0"),
    ({"k1": 2.0}, TypeError, "k1 must be an int, got float"),
    ({"k1": True}, TypeError, "k1 must be an int, got bool"),
    ({"k2": np.bool_(True)}, TypeError, "k2 must be an int, got bool"),
    ({"k2": np.float64(2.0)}, TypeError, "k2 must be an int, got float64"),
    ({"k2": torch.tensor(2)}, TypeError, "k2 must be an int, got an int64 tensor"),
    ({"k2": np.int64(0)}, ValueError, "k2 must be at least 1, got 0"),
    ({"k1": 4, "k2": 2}, ValueError, "k2 must be at least k1, got k1=4, k2=2"),
    ({"start": True}, TypeError, "start must be an int or an int64 tensor [B], got bool"),
    ({"start": np.int64(V)}, ValueError, "start must be in [0, 7), got 7"),
    ({"num_items": True}, TypeError, "num_items must be a number or a 0-dim tensor, got bool"),
    ({"num_items": np.int64(-1)}, ValueError, "num_items must be at least 0, got -1"),
    ({"eos": np.int64(V)}, ValueError, "eos must be in [0, 7), got 7"),
    ({"cell": nn.GRU(H, H, batch_first=True), "state": torch.zeros(1, T, H)}, ValueError,
     "targets must be [T, B] with B = 4, got [4, 3]. "
     "Pass batch_first=True if they are [B, T]: that of the cell does not say so"),
    ({"cell": nn.LSTM(H, H, batch_first=True), "lengths": torch.tensor([1, 2, 3, 1])}, ValueError,
     "targets must be [T, B] with B = 4, got [4, 3]. "
     "Pass batch_first=True if they are [B, T]: that of the cell does not say so"),
    ({"lengths": torch.tensor([1, 2, 5])}, ValueError, "lengths must be in [0, 4], got [1, 2, 5]"),
    ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths must have shape [3], got [2]"),
    ({"lengths": [1, 2, 3]}, TypeError, "lengths must be an int64 tensor [B], got list"),
    ({"eos": V}, ValueError, "eos must be in [0, 7), got 7"),
    ({"ignore_index": 1.0}, TypeError, "ignore_index must be an int, got float"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be at most 1, got 1.5"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be at least 0, got -0.1"),
    ({"z_loss": -1.0}, ValueError, "z_loss must be at least 0, got -1.0"),
    ({"class_weight": torch.ones(V + 1)}, ValueError, "class_weight must have shape [7], got [8]"),
    ({"class_weight": [1.0] * V}, TypeError, "class_weight must be a floating-point tensor [V], got list"),
    ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
    ({"num_items": -1}, ValueError, "num_items must be at least 0, got -1"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items must be None unless reduction is 'mean', got 3"),
    ({"num_items": torch.ones(2)}, ValueError, "num_items must be a number or a 0-dim tensor, got [2]"),
    ({"temperature": 0.0}, ValueError, "temperature must be greater than 0, got 0.0"),
    ({"generator": 3}, TypeError, "generator must be a torch.Generator or None, got int"),
    ({"context": torch.zeros(3)}, TypeError, "context must be a tuple of tensors, got a float32 tensor"),
    ({"context": (3,)}, TypeError, "context[0] must be a tensor, got int"),
    ({"context": (torch.zeros(3),)}, ValueError, "context must be empty for one of torch's cells, got 1 tensors. "
     "Wrap the cell: lambda x, state, memory: ..."),
    ({"memory_budget": 27}, ValueError, "memory_budget must hold one row of logits, 28 bytes, got 27"),
    ({"memory_budget": 1e6}, TypeError, "memory_budget must be an int, got float"),
    ({"cell": lambda x, s: (x, s), "state": torch.zeros(2), "lengths": torch.tensor([1, 2, 3])}, ValueError,
     "state must hold tensors with the batch in dimension 0 to be frozen by row, got shape [2]"),
]  # fmt: skip
BATCH_FIRST = nn.GRU(H, H, batch_first=True)
DOUBTFUL: list[tuple[dict[str, Any], str]] = [
    ({"k1": 2}, "k1=2 has no effect without k2: the gradient flows all the way back. "
     "Pass k2=2 to truncate it, or leave k1 out"),
    ({"cell": BATCH_FIRST}, "targets [4, 3] are read as [T, B], though the cell has batch_first=True. "
     "Pass batch_first=True if they are [B, T], and set cell.batch_first = False if not"),
    ({"cell": BATCH_FIRST, "targets": TARGETS[:3], "state": torch.zeros(1, B, H)},
     "targets [3, 3] are read as [T, B], though the cell has batch_first=True. "
     "Pass batch_first=True if they are [B, T], and set cell.batch_first = False if not"),
]  # fmt: skip
CLEAR: list[dict[str, Any]] = [
    {"k2": 2},
    {"k1": 2, "k2": 3},
    {"cell": BATCH_FIRST, "state": torch.zeros(1, B, H)},
    {"cell": BATCH_FIRST, "lengths": torch.tensor([1, 2, 3])},
    {"cell": BATCH_FIRST, "start": torch.tensor([1, 2, 3])},
    {"cell": BATCH_FIRST, "batch_first": True, "targets": TARGETS.t()},
    {"batch_first": True, "targets": TARGETS.t()},
]
NUMBERS: list[dict[str, int]] = [
    {"k1": 2, "k2": 3},
    {"start": 4},
    {"eos": 2},
    {"ignore_index": 3},
    {"num_items": 5},
    {"memory_budget": 100},
]
VOCABULARY = 13  # of make_decoder


def base(**changes: Any) -> dict[str, Any]:
    call = {
        "embedding": nn.Embedding(V, H),
        "cell": nn.GRUCell(H, H),
        "head": nn.Linear(H, V),
        "targets": TARGETS,
        "feedback": "greedy",
    }
    return {**call, **changes}


@pytest.mark.parametrize(("change", "kind", "text"), WRONG, ids=[text[:60] for _, _, text in WRONG])
def test_decode_loss(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    call = base(**change)
    accumext.decode_loss(**base())  # the call is right but for the change
    generator = torch.get_rng_state()
    with pytest.raises(kind, match=rf"^decode_loss: {re.escape(text)}$"):
        accumext.decode_loss(**call)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(("change", "text"), DOUBTFUL, ids=[text[:60] for _, text in DOUBTFUL])
@pytest.mark.parametrize("call", [accumext.decode_loss, accumext.decode_memory])
def test_doubtful_arguments(call: Any, change: dict[str, Any], text: str) -> None:
    with pytest.warns(UserWarning, match=rf"^decode_loss: {re.escape(text)}$") as caught:
        call(**base(**change))
    assert [warning.filename for warning in caught] == [__file__]  # one, at the user's line


def test_a_line_is_warned_about_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()  # what a program starts with
        for _ in range(3):
            accumext.decode_loss(**base(k1=2))
    assert len(caught) == 1


@pytest.mark.parametrize("change", CLEAR, ids=[", ".join(change) for change in CLEAR])
def test_nothing_is_said_of_what_is_clear(change: dict[str, Any]) -> None:
    accumext.decode_loss(**base(**change))  # a warning is an error in this suite


def test_batch_first_of_the_cell_changes_nothing() -> None:
    plain = nn.GRU(H, H)
    plain.load_state_dict(BATCH_FIRST.state_dict())
    state = torch.randn(1, B, H)
    call = base(state=state)
    found, expected = (
        accumext.decode_loss(**{**call, "cell": cell}) for cell in (BATCH_FIRST, plain)
    )
    assert torch.equal(found.token_losses, expected.token_losses)


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
@pytest.mark.parametrize("arguments", NUMBERS, ids=[", ".join(names) for names in NUMBERS])
def test_integers_of_numpy(arguments: dict[str, int], kind: Any) -> None:
    call = base()
    expected = accumext.decode_loss(**call, **arguments)
    found = accumext.decode_loss(**call, **{name: kind(n) for name, n in arguments.items()})
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.inputs, expected.inputs)
    parameters = list(call["cell"].parameters())
    for got, want in zip(*(torch.autograd.grad(o.loss, parameters) for o in (found, expected))):
        assert torch.equal(got, want)


def test_modules_that_do_more_than_their_weight_are_refused() -> None:
    decoder = make_decoder("gru_cell")

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    decoder.head = Twice(5, VOCABULARY).double()
    text = "head must compute as a plain nn.Linear, for its forward is not called, got Twice"
    with raises(TypeError, text):
        run(decoder)
    decoder = make_decoder("gru_cell")
    decoder.embedding.register_forward_hook(lambda *_: None)
    with raises(TypeError, "embedding must compute as a plain nn.Embedding"):
        run(decoder)


def test_parametrizations_are_followed() -> None:
    decoder = make_decoder("gru_cell")
    nn.utils.parametrizations.weight_norm(decoder.head)
    decoder.leaves = [*decoder.head.parameters(), decoder.state]
    out = run(decoder)
    losses, divisor, _ = decode(decoder, decoding.TARGETS, out.inputs)
    expected = decoder.gradients(losses.sum() / divisor)
    assert relative_distance(decoder.gradients(out.loss), expected) < EXACT
