"""Half precision and autocast: only the operands of products are rounded."""

from __future__ import annotations

import pytest
import torch
from support.decode_oracle import decode, make_decoder, relative_distance

import accumext

STEPS, BATCH, VOCABULARY = 7, 3, 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_low_precision_is_no_worse_than_plain(dtype: torch.dtype, feedback: str) -> None:
    """error(accumext) <= error(plain PyTorch in that dtype) + tolerance, against float64."""
    decoder = make_decoder("gru_cell", vocabulary=50, size=16, dtype=dtype)
    targets = torch.randint(50, (12, BATCH))
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback=feedback
    )
    actual = decoder.gradients(
        out.loss * 1024
    )  # loss scaled: fp16 must neither under- nor overflow
    assert out.loss.dtype == out.token_losses.dtype == torch.float32
    assert [g.dtype for g in actual] == [dtype] * len(actual)
    losses, divisor, _ = decode(decoder, targets, out.inputs)
    plain = decoder.gradients(losses.sum() / divisor * 1024)
    truth = make_decoder("gru_cell", vocabulary=50, size=16)
    with torch.no_grad():
        for exact, leaf in zip(truth.leaves, decoder.leaves, strict=True):
            exact.copy_(leaf)
    losses, divisor, _ = decode(truth, targets, out.inputs)
    expected = truth.gradients(losses.sum() / divisor * 1024)
    # half a unit in the last place of the results, for they too are rounded to the dtype
    rounding = torch.finfo(dtype).eps
    assert relative_distance(actual, expected) <= relative_distance(plain, expected) + rounding


def test_autocast_rounds_the_products_only() -> None:
    decoder = make_decoder("gru_cell", vocabulary=50, size=16, dtype=torch.float32)
    targets = torch.randint(50, (12, BATCH))
    with torch.autocast("cpu", torch.bfloat16):
        out = accumext.decode_loss(
            decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="greedy"
        )
        losses, divisor, _ = decode(decoder, targets, out.inputs)
    grads = decoder.gradients(out.loss)
    assert {g.dtype for g in grads} == {torch.float32}
    assert out.loss.dtype == torch.float32
    exact, counted, _ = decode(decoder, targets, out.inputs)
    truth = decoder.gradients(exact.sum() / counted)
    plain = relative_distance(decoder.gradients(losses.sum() / divisor), truth)
    assert 0 < relative_distance(grads, truth) <= plain + torch.finfo(torch.bfloat16).eps
