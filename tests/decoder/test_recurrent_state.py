"""Recurrent states: any nesting, frozen rows, and random numbers that a replay repeats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, STEPS, VOCABULARY, run, targets_with_holes

import accumext


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_replays_in_the_backward_pass(dropout: float) -> None:
    decoder = make_decoder("gru", dropout=dropout)
    targets = targets_with_holes(40)
    inputs = torch.randint(VOCABULARY, targets.shape)
    torch.manual_seed(5)
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
        feedback="teacher", inputs=inputs,
    )  # fmt: skip
    torch.manual_seed(5)
    losses, divisor, _ = decode(decoder, targets, inputs)
    expected = losses.sum() / divisor
    torch.testing.assert_close(out.loss, expected, rtol=EXACT, atol=EXACT)
    torch.manual_seed(99)  # the backward pass must bring its own
    actual = decoder.gradients(out.loss)
    assert relative_distance(actual, decoder.gradients(expected)) < EXACT


def test_state_carries_a_graph_into_the_next_call() -> None:
    decoder = make_decoder("lstm_cell")
    targets = targets_with_holes(10)
    call = (decoder.embedding, decoder.cell, decoder.head)
    whole = accumext.decode_loss(*call, targets, decoder.state, feedback="teacher", reduction="sum")
    first = accumext.decode_loss(
        *call, targets[:4], decoder.state, feedback="teacher", reduction="sum"
    )
    second = accumext.decode_loss(
        *call,
        targets[4:],
        first.state,
        feedback="teacher",
        inputs=whole.inputs[4:],
        reduction="sum",
    )
    actual = decoder.gradients(first.loss + second.loss)
    assert relative_distance(actual, decoder.gradients(whole.loss)) < EXACT


def test_lengths_freeze_the_state() -> None:
    decoder = make_decoder("lstm")
    targets = torch.randint(VOCABULARY, (STEPS, BATCH))
    lengths = torch.tensor([2, 0, 7])
    call = (decoder.embedding, decoder.cell, decoder.head)
    whole = accumext.decode_loss(*call, targets, decoder.state, feedback="teacher", lengths=lengths)
    first_two = accumext.decode_loss(*call, targets[:2], decoder.state, feedback="teacher")
    for frozen, part, start in zip(whole.state, first_two.state, decoder.state, strict=True):
        assert torch.equal(frozen[:, 0], part[:, 0])
        assert torch.equal(frozen[:, 1], start[:, 1])
    assert (whole.token_losses[2:, 0] == 0).all()
    assert (whole.token_losses[:, 1] == 0).all()


def test_the_global_generator_may_be_given_beside_dropout() -> None:
    decoder = make_decoder("gru_cell")

    def cell(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.dropout(decoder.cell(x, h))
        return h, h

    grads = []
    for generator in (None, torch.default_generator):
        torch.manual_seed(0)
        out = run(decoder, cell, feedback="sample", generator=generator)
        grads.append(decoder.gradients(out.loss))
    assert relative_distance(*grads) == 0
