"""Calls of `decode_loss` on small decoders, and what they are compared with."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import accumext
from support.decode_oracle import Decoder, decode, relative_distance

STEPS, BATCH, VOCABULARY = 7, 3, 13
TARGETS = torch.arange(6 * BATCH).view(6, BATCH) % VOCABULARY
EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms

# k1 and k2: every step, overlapping windows, windows longer than the sequence.
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


def targets_with_holes(steps: int = STEPS, hole: int = -100) -> torch.Tensor:
    """Random targets, one of which is ignored."""
    targets = torch.randint(VOCABULARY, (steps, BATCH))
    targets[steps // 2, 0] = hole
    return targets


def run(
    decoder: Decoder, cell: Any = None, state: Any = None, **call: Any
) -> accumext.DecodeOutput:
    """`decode_loss` of TARGETS, teacher-forced unless said otherwise."""
    call = {"feedback": "teacher", **call}
    cell = decoder.cell if cell is None else cell
    state = decoder.state if state is None else state
    return accumext.decode_loss(decoder.embedding, cell, decoder.head, TARGETS, state, **call)


def raises(kind: type[Exception], text: str) -> Any:
    """An error of `decode_loss` that begins with this text."""
    return pytest.raises(kind, match=rf"^decode_loss: {re.escape(text)}")


def check_exact(
    decoder: Decoder, targets: torch.Tensor, call: dict[str, Any]
) -> accumext.DecodeOutput:
    """Loss, token losses and every gradient equal the plain loop's on the same tokens."""
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, **call
    )
    lengths = call.get("lengths")
    live = None if lengths is None else torch.arange(len(targets))[:, None] < lengths
    criterion = {
        k: call[k]
        for k in ("ignore_index", "label_smoothing", "z_loss", "class_weight")
        if k in call
    }
    losses, divisor, logits = decode(decoder, targets, out.inputs, live, **criterion)
    expected = losses.sum() / divisor if divisor else losses.sum()
    torch.testing.assert_close(out.loss, expected.detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(out.token_losses, losses.detach(), rtol=1e-11, atol=EXACT)
    distance = relative_distance(decoder.gradients(out.loss), decoder.gradients(expected))
    assert distance < EXACT
    if call.get("feedback") != "sample":
        greedy = logits.argmax(-1)
        assert torch.equal(out.tokens, greedy if live is None else greedy.where(live, out.tokens))
    return out
