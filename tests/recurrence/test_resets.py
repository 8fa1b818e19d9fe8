"""Rows that begin anew in the middle of a call."""

from __future__ import annotations

import pytest
import torch
from support.decode_oracle import CELLS, decode, make_decoder, relative_distance
from support.decoding import BATCH, EXACT, TARGETS, raises, run

from accumext.recurrence._resets import Resets, resets_of

STEPS = len(TARGETS)


@pytest.mark.parametrize("called", [False, True], ids=["kernels", "callable"])
@pytest.mark.parametrize("kind", sorted(CELLS))
def test_episodes_are_calls_of_their_own(kind: str, called: bool) -> None:
    """Every row reset before step 4: two calls from the same initial state."""
    decoder = make_decoder(kind)
    resets = torch.zeros(STEPS, BATCH, dtype=torch.bool)
    resets[4] = True
    cell = decoder.step if called else decoder.cell
    options = {"reduction": "sum", "batch_dim": int(CELLS[kind][1] is not None)}
    whole = run(decoder, cell, resets=resets, **options)
    losses, _, _ = decode(decoder, TARGETS[:4], whole.inputs[:4])
    more, _, _ = decode(decoder, TARGETS[4:], whole.inputs[4:])
    expected = losses.sum() + more.sum()
    torch.testing.assert_close(whole.loss, expected, rtol=EXACT, atol=EXACT)
    actual = decoder.gradients(whole.loss)
    assert relative_distance(actual, decoder.gradients(expected)) < EXACT


def test_a_mask_that_the_host_does_not_read() -> None:
    """As on a GPU: every step may have a reset."""
    decoder = make_decoder("lstm")
    mask = torch.rand(STEPS, BATCH) < 0.3
    known = resets_of(mask, torch.device("cpu"))
    assert known.steps == {t for t in range(1, STEPS) if mask[t].any()}
    every = Resets(mask, frozenset(range(1, STEPS)))
    expected = decoder.gradients(run(decoder, feedback="greedy", resets=mask).loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accumext.decoder._tokens.resets_of", lambda *_: every)
        actual = decoder.gradients(run(decoder, feedback="greedy", resets=mask).loss)
    assert relative_distance(actual, expected) < EXACT


def test_a_reset_of_a_row_that_has_ended_does_nothing() -> None:
    decoder = make_decoder("gru_cell")
    lengths, resets = torch.tensor([2, 6, 0]), torch.ones(STEPS, BATCH, dtype=torch.bool)
    out = run(decoder, lengths=lengths, resets=resets)
    one = run(decoder, lengths=torch.tensor([1, 1, 0]), inputs=out.inputs[[1] * STEPS])
    torch.testing.assert_close(out.state[0], one.state[0])
    assert torch.equal(out.state[2], decoder.state[2])


def test_a_reset_is_not_cut() -> None:
    """The gradient reaches the initial state from a reset in any window, at any border."""
    for k1, k2 in ((2, 2), (2, 5), (1, 1)):
        for step in range(1, STEPS):
            decoder = make_decoder("gru_cell")
            resets = torch.zeros(STEPS, BATCH, dtype=torch.bool)
            resets[step, 1] = True
            out = run(decoder, resets=resets, k1=k1, k2=k2)
            losses, divisor, _ = decode(
                decoder, TARGETS, out.inputs, windows=(k1, k2), resets=resets
            )
            expected = decoder.gradients(losses.sum() / divisor)
            assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


def test_random_cuts_spare_resets() -> None:
    """A mean of 2 steps cuts half of all gradients, and none of those that a reset sends on."""
    resets = torch.ones(STEPS, BATCH, dtype=torch.bool)
    for called in (False, True):
        decoder = make_decoder("gru_cell")
        cell = decoder.step if called else decoder.cell
        out = run(decoder, cell, resets=resets, k2=2, truncation="random")
        expected = decoder.gradients(run(decoder, cell, resets=resets).loss)
        assert relative_distance(decoder.gradients(out.loss), expected) < EXACT


def test_what_resets_must_be() -> None:
    decoder = make_decoder("gru_cell")
    with raises(TypeError, "resets must be a bool tensor [T, B], got an int64 tensor"):
        run(decoder, resets=TARGETS)
    with raises(ValueError, "resets must have shape [6, 3], got [3, 6]"):
        run(decoder, resets=torch.zeros(3, 6).bool())

    def starts_itself(x: torch.Tensor, h: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        h = decoder.cell(x, h)
        return h, h

    decoder.state = None
    with raises(ValueError, "state must be given where rows are reset to it, got None"):
        run(decoder, starts_itself, resets=torch.zeros(6, 3).bool())
