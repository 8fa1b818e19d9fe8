"""TBPTT(k1, k2) against its definition: every window re-run from a detached state."""

from __future__ import annotations

import pytest
import torch
from support.decode_oracle import make_decoder, relative_distance
from support.decoding import BATCH, PERIODS, VOCABULARY, check, run, wrapped


@pytest.mark.parametrize("called", [False, True], ids=["module", "callable"])
@pytest.mark.parametrize("periods", PERIODS, ids=lambda p: f"k1={p[0]},k2={p[1]}")
def test_decode_loss_truncates_by_the_definition(periods: tuple[int, int], called: bool) -> None:
    """Of sequences that windows divide, and that they do not."""
    for steps, feedback in ((1, "teacher"), (8, "greedy"), (17, "teacher")):
        decoder = make_decoder("lstm_cell", tied=True)
        call = {"feedback": feedback, "k1": periods[0], "k2": periods[1]}
        call["lengths"] = torch.randint(1, steps + 1, (BATCH,))
        targets = torch.randint(VOCABULARY, (steps, BATCH))
        check(decoder, targets, call, wrapped(decoder) if called else None)


@pytest.mark.filterwarnings("ignore:decode_loss. k1=1 has no effect without k2")
def test_truncation_matters() -> None:
    """The gradients of k2 = 1, 2 and None differ, so that the test above can fail."""
    decoder = make_decoder("gru_cell")
    grads = [decoder.gradients(run(decoder, k1=1, k2=k2).loss) for k2 in (1, 2, None)]
    assert relative_distance(grads[0], grads[1]) > 1e-3
    assert relative_distance(grads[1], grads[2]) > 1e-3
