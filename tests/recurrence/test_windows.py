"""One definition of k1 and k2, for every function that has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import Decoder, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, VOCABULARY
from torch import Tensor

import accumext
from accumext.recurrence._truncation import windows

# T no multiple of k1 among them: a last window of fewer steps.
CASES = [(7, 3, 3), (7, 3, 5), (7, 2, 7), (8, 4, 4), (8, 4, 6), (5, 8, 8), (5, 4, 9), (7, 1, 1)]


def test_windows_by_the_definition() -> None:
    assert windows(7, 3, 3) == [(0, 0, 3), (3, 3, 6), (6, 6, 7)]
    assert windows(7, 3, 5) == [(0, 0, 3), (1, 3, 6), (2, 6, 7)]
    assert windows(6, 3, 3) == [(0, 0, 3), (3, 3, 6)]
    assert windows(2, 3, 5) == [(0, 0, 2)]


def by_rnn(decoder: Decoder, inputs: Tensor, targets: Tensor, k1: int, k2: int) -> Tensor:
    return accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state, feedback="teacher",
        inputs=inputs, k1=k1, k2=k2,
    ).loss  # fmt: skip


def by_callable(decoder: Decoder, inputs: Tensor, targets: Tensor, k1: int, k2: int) -> Tensor:
    return accumext.decode_loss(
        decoder.embedding, lambda x, h: decoder.step(x, h), decoder.head, targets, decoder.state,
        feedback="teacher", inputs=inputs, k1=k1, k2=k2,
    ).loss  # fmt: skip


def by_rollout(decoder: Decoder, inputs: Tensor, targets: Tensor, k1: int, k2: int) -> Tensor:
    def step(token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        output, h = decoder.step(decoder.embedding(token), h)
        return decoder.head(output), h

    return accumext.rollout(
        step, decoder.state, len(targets), loss=lambda z, t: F.cross_entropy(z, targets[t]),
        start=inputs[0], feed=lambda z, t: inputs[t + 1], k1=k1, k2=k2, checkpoint=2,
    ).loss  # fmt: skip


def by_tbptt(decoder: Decoder, inputs: Tensor, targets: Tensor, k1: int, k2: int) -> list[Tensor]:
    def step(token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        output, h = decoder.step(decoder.embedding(token), h)
        return decoder.head(output), h

    accumext.tbptt(
        step, targets, decoder.state, criterion=F.cross_entropy, feedback="teacher", inputs=inputs,
        k1=k1, k2=k2,
    )  # fmt: skip
    return [leaf.grad for leaf in decoder.leaves]


@pytest.mark.parametrize(
    "way", [by_rnn, by_callable, by_rollout, by_tbptt], ids=lambda w: w.__name__
)
@pytest.mark.parametrize(("steps", "k1", "k2"), CASES)
def test_every_function_has_these_windows(way: Any, steps: int, k1: int, k2: int) -> None:
    decoder = make_decoder("gru_cell")
    inputs, targets = torch.randint(VOCABULARY, (2, steps, BATCH))
    losses, divisor, _ = decode(decoder, targets, inputs, windows=(k1, k2))
    expected = decoder.gradients(losses.sum() / divisor)
    found = way(decoder, inputs, targets, k1, k2)
    gradients = decoder.gradients(found) if isinstance(found, Tensor) else found
    assert relative_distance(gradients, expected) < EXACT
