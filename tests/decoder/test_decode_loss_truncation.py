"""TBPTT(k1, k2) against its definition: every window re-run from a detached state."""

from __future__ import annotations

import pytest
import torch
from support.decode_oracle import decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, PERIODS, VOCABULARY

import accumext


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
