"""decode_loss against a plain autograd loop over the tokens it emitted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import examples
from support.decode_oracle import CELLS, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, STEPS, VOCABULARY, check_exact, run, targets_with_holes

import accumext

OPTIONS: list[dict[str, Any]] = [
    {"lengths": torch.tensor([7, 0, 4])},
    {"ignore_index": 2},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"class_weight": torch.linspace(0.0, 2.0, VOCABULARY, dtype=torch.float64)},
    {
        "label_smoothing": 0.3,
        "z_loss": 0.1,
        "class_weight": torch.linspace(0.1, 1.0, VOCABULARY, dtype=torch.float64),
        "lengths": torch.tensor([1, 6, 7]),
    },
    {"memory_budget": VOCABULARY * 8},
    {"memory_budget": VOCABULARY * 8 * 5},
    {"start": torch.tensor([3, 0, 12])},
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("feedback", ["teacher", "greedy", "scheduled", "sample"])
@pytest.mark.parametrize("kind", CELLS)
def test_gradients_equal_plain_autograd(kind: str, feedback: str, tied: bool) -> None:
    call = {"feedback": feedback, "start": 1}
    if feedback == "scheduled":
        call["teacher_forcing"] = 0.5
    check_exact(make_decoder(kind, tied=tied), targets_with_holes(), call)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: "+".join(o))
def test_options_equal_plain_autograd(option: dict[str, Any], feedback: str, bias: bool) -> None:
    decoder = make_decoder("lstm", bias=bias)
    targets = targets_with_holes(hole=option.get("ignore_index", -100))
    check_exact(decoder, targets, {"feedback": feedback, **option})


@settings(max_examples=examples(40), deadline=None)
@given(
    kind=st.sampled_from(sorted(CELLS)),
    steps=st.integers(1, 35),
    feedback=st.sampled_from(["teacher", "greedy", "scheduled", "sample"]),
    tied=st.booleans(),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.2]),
    z_loss=st.sampled_from([0.0, 0.05]),
    weighted=st.booleans(),
    short=st.booleans(),
    padded=st.booleans(),
    rows=st.integers(1, 12),
    seed=st.integers(0, 2**20),
)
def test_any_combination_equals_plain_autograd(
    kind: str, steps: int, feedback: str, tied: bool, bias: bool, smoothing: float, z_loss: float,
    weighted: bool, short: bool, padded: bool, rows: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    call: dict[str, Any] = {
        "feedback": feedback,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "memory_budget": rows * VOCABULARY * 8,
    }
    if feedback == "scheduled":
        call["teacher_forcing"] = 0.4
    if weighted:
        call["class_weight"] = torch.rand(VOCABULARY, dtype=torch.float64)
    if short:
        call["lengths"] = torch.randint(0, steps + 1, (BATCH,))
    decoder = make_decoder(kind, tied=tied, bias=bias, padding_idx=4 if padded else None)
    check_exact(decoder, targets_with_holes(steps), call)


def test_gradcheck() -> None:
    decoder = make_decoder("gru_cell", vocabulary=6, size=3, batch=2)
    targets = torch.randint(6, (4, 2))
    inputs = torch.randint(6, (4, 2))

    def loss(
        state: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        call = {"feedback": "teacher", "inputs": inputs, "label_smoothing": 0.1, "z_loss": 0.1}
        return accumext.decode_loss(
            table, decoder.cell, (weight, bias), targets, state, **call
        ).loss

    leaves = (decoder.state, decoder.embedding.weight, decoder.head.weight, decoder.head.bias)
    assert torch.autograd.gradcheck(loss, tuple(t.detach().requires_grad_() for t in leaves))


@pytest.mark.parametrize("batch_first", [False, True])
def test_upstream_gradient_is_honoured_per_token(batch_first: bool) -> None:
    decoder = make_decoder("gru_cell")
    targets = targets_with_holes()
    upstream = torch.randn(STEPS, BATCH, dtype=torch.float64)

    def flip(t: torch.Tensor) -> torch.Tensor:
        return t.t() if batch_first else t

    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, flip(targets), decoder.state,
        feedback="greedy", reduction="none", batch_first=batch_first,
    )  # fmt: skip
    losses, _, _ = decode(decoder, targets, flip(out.inputs))
    torch.testing.assert_close(flip(out.loss), losses, rtol=EXACT, atol=EXACT)
    actual = decoder.gradients((out.loss * flip(upstream)).sum())
    expected = decoder.gradients((losses * upstream).sum())
    assert relative_distance(actual, expected) < EXACT


def test_no_graph_without_grad_mode() -> None:
    decoder = make_decoder("gru_cell")
    with torch.no_grad():
        out = accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets_with_holes(), feedback="greedy"
        )
    assert not out.loss.requires_grad
    assert out.state.shape == (BATCH, 5)


def test_results_are_the_callers_to_write() -> None:
    decoder = make_decoder("gru_cell")
    expected = decoder.gradients(run(decoder).loss)
    out = run(decoder)
    for result in (out.inputs, out.tokens, out.token_losses):
        result.zero_()
    assert relative_distance(decoder.gradients(out.loss), expected) == 0


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("of_loss", [False, True])
def test_second_derivatives_are_refused(called: bool, of_loss: bool) -> None:
    """Some, or parts, of them would be missing without a word."""
    decoder = make_decoder("gru_cell")
    cell = decoder.step if called else decoder.cell
    out = run(decoder, cell, return_outputs=True)
    loss = out.loss * decoder.head.bias.sum() if of_loss else out.outputs.square().sum()
    text = "decode_loss: the backward pass must run without create_graph, got create_graph=True. "
    with pytest.raises(RuntimeError, match=text):
        torch.autograd.grad(loss, decoder.leaves, create_graph=True, allow_unused=True)
