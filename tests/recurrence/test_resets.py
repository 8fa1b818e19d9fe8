"""Rows that begin anew in the middle of a call. Their losses and gradients, in windows and where
rows end, are held against the plain loop by tests/decoder/test_decode_loss_options.py."""

import pytest
import torch
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import BATCH, EXACT, TARGETS, run, wrapped

from accumext.recurrence._resets import Resets, resets_of

STEPS = len(TARGETS)


def test_a_mask_that_the_host_does_not_read():
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


def test_random_cuts_spare_resets():
    """A mean of 2 steps cuts half of all gradients, and none of those that a reset sends on."""
    resets = torch.ones(STEPS, BATCH, dtype=torch.bool)
    decoder = make_decoder("gru_cell")
    for cell in (decoder.cell, wrapped(decoder)):
        out = run(decoder, cell, resets=resets, k2=2, truncation="random")
        expected = decoder.gradients(run(decoder, cell, resets=resets).loss)
        assert relative_distance(decoder.gradients(out.loss), expected) < EXACT
