"""TBPTT(k1, k2) against its definition: every window re-run from a detached state."""

import pytest
import torch
from support.decode_oracle import make_decoder
from support.decoding import BATCH, VOCABULARY, check, wrapped

# k1 and k2: every step, overlapping windows, windows longer than the sequence.
PERIODS = [(1, 1), (1, 2), (1, 7), (2, 2), (2, 5), (3, 4), (4, 8), (5, 11), (8, 8), (20, 20)]


@pytest.mark.parametrize("called", [False, True], ids=["module", "callable"])
@pytest.mark.parametrize("periods", PERIODS, ids=lambda p: f"k1={p[0]},k2={p[1]}")
def test_decode_loss_truncates_by_the_definition(periods, called):
    """Of sequences that windows divide, and that they do not."""
    for steps, feedback in ((1, "teacher"), (8, "greedy"), (17, "teacher")):
        decoder = make_decoder("lstm_cell", tied=True)
        call = {"feedback": feedback, "k1": periods[0], "k2": periods[1]}
        call["lengths"] = torch.randint(1, steps + 1, (BATCH,))
        targets = torch.randint(VOCABULARY, (steps, BATCH))
        check(decoder, targets, call, wrapped(decoder) if called else None)
