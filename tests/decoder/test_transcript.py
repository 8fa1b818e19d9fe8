"""Tokens, lengths and the reduced loss of a call, and what counts in them."""

from __future__ import annotations

import pytest
import torch
from support.decode_oracle import decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, targets_with_holes
from support.device import DeviceReads
from torch import Tensor

import accumext


def test_reductions_and_divisors() -> None:
    decoder = make_decoder("rnn_cell")
    targets = targets_with_holes()
    call = (decoder.embedding, decoder.cell, decoder.head, targets, decoder.state)
    mean = accumext.decode_loss(*call, feedback="greedy")
    total = accumext.decode_loss(*call, feedback="greedy", reduction="sum")
    by_items = accumext.decode_loss(*call, feedback="greedy", num_items=40)
    by_tensor = accumext.decode_loss(*call, feedback="greedy", num_items=torch.tensor(40))
    count = (targets != -100).sum()
    torch.testing.assert_close(mean.loss * count, total.loss)
    torch.testing.assert_close(by_items.loss * 40, total.loss)
    torch.testing.assert_close(by_tensor.loss, by_items.loss, rtol=0, atol=0)
    torch.testing.assert_close(total.token_losses.sum(), total.loss.detach())


@pytest.mark.parametrize(
    "options", [{}, {"num_items": 40}, {"num_items": 0.5}, {"eos": 1}], ids=str
)
@pytest.mark.parametrize(
    "feedback",
    [{"feedback": word} for word in ("teacher", "greedy", "sample")]
    + [{"feedback": "scheduled", "teacher_forcing": 0.5}],
    ids=lambda given: given["feedback"],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "callable"])
def test_no_number_of_the_host_is_copied_to_the_device(wrapped, feedback, options) -> None:
    """Such a copy waits until the device has done all that it was given."""
    decoder = make_decoder("gru_cell")
    targets = targets_with_holes()

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = decoder.cell(x, state)
        return state, state

    call = (decoder.embedding, step if wrapped else decoder.cell, decoder.head, targets)
    with DeviceReads() as reads:
        out = accumext.decode_loss(*call, decoder.state, **feedback, **options)
        out.loss.backward()
    assert reads.made == 0


def test_eos_stops_rows_that_emitted_it() -> None:
    torch.manual_seed(3)  # a run in which rows end at different steps
    decoder = make_decoder("gru", vocabulary=5, padding_idx=2)
    targets = torch.randint(5, (20, BATCH))
    eos = 1
    out = accumext.decode_loss(
        decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
        feedback="sample", temperature=2.0, eos=eos,
    )  # fmt: skip
    ended = torch.zeros(BATCH, dtype=torch.bool)
    live = torch.zeros_like(targets, dtype=torch.bool)
    for t, tokens in enumerate(out.tokens):
        live[t] = ~ended
        ended = ended | (tokens == eos) & live[t]
    assert 0 < live.sum() < live.numel()
    assert (out.tokens[~live] == 2).all()
    assert (out.inputs[~live] == 2).all()
    losses, divisor, _ = decode(decoder, targets, out.inputs, live)
    torch.testing.assert_close(out.loss, (losses.sum() / divisor).detach(), rtol=EXACT, atol=EXACT)
    distance = relative_distance(
        decoder.gradients(out.loss), decoder.gradients(losses.sum() / divisor)
    )
    assert distance < EXACT


@pytest.mark.parametrize("feedback", ["teacher", "greedy"])
def test_nothing_counted_is_zero_and_never_nan(feedback: str) -> None:
    decoder = make_decoder("gru_cell")
    for targets in (torch.full((4, BATCH), -100), torch.zeros(0, BATCH, dtype=torch.int64)):
        for reduction in ("mean", "sum", "none"):
            out = accumext.decode_loss(
                decoder.embedding, decoder.cell, decoder.head, targets, decoder.state,
                feedback=feedback, reduction=reduction, label_smoothing=0.1, z_loss=0.1,
            )  # fmt: skip
            assert (out.loss == 0).all()
            grads = torch.autograd.grad(out.loss.sum(), decoder.leaves)
            assert all((g == 0).all() for g in grads)
