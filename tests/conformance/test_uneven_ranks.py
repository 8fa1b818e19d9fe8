"""Ranks that do not have equally many micro-batches."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import ranks
import shares
from ranks import across
from shares import BATCHES, WINDOW, as_expected, by_hand, error_of, made, own_share, train
from support.optimizer_oracle import OP, adam, loss_of, state_of, train_by_hand

# How many micro-batches each rank has, and what the error says of them
UNEVEN = {
    "a_step_meets_a_flush": {"counts": [4, 3], "got": "full with 4, 3"},
    "flushes_with_different_counts": {"counts": [3, 2], "got": "3, 2"},
    "flush_of_nothing": {"counts": [1, 0], "got": "1, 0"},
    "a_last_backward_meets_a_flush": {
        "counts": [4, 3],
        "got": "full with 4, 3",
        "reduce_in_backward": True,
    },
}


@across(2, cases=UNEVEN)
def test_an_uneven_last_window_is_an_error_on_all_ranks(rank, world, counts, got, **options):
    """A rank with fewer micro-batches ends in an error that says so, and nothing has changed"""
    model, opt = made(**options)
    parameters, share = list(model.parameters()), own_share(rank, world)
    calls = []
    for batch, weight in share[: counts[rank]]:
        calls += [partial(opt.backward, loss_of(model, batch), weight), opt.step]
    start = time.monotonic()
    for call in [*calls, opt.flush]:
        before = state_of(opt, parameters)
        error = error_of(call)
        if error:
            break
    seconds, after = time.monotonic() - start, state_of(opt, parameters)
    # All drop what is open, and train on evenly.
    opt.discard()
    train(opt, model, share[:WINDOW])
    assert error.startswith(f"RuntimeError: {OP}")
    contract = "the window must hold the same number of micro-batches on every process"
    assert f"{contract}, got {got} by rank." in error
    assert "with weight=0 counts for nothing" in error
    assert after == before
    assert seconds < 20.0  # of 60 that a hang would take
    assert opt.stepped
    return as_expected(model, opt, by_hand(2, 0, WINDOW, max_norm=None))


def alone(rank: int, folder: str, leaves: bool) -> None:
    """Leave rank 0 alone: rank 1 goes, or does something else until rank 0 has given up."""
    ranks.join(rank, 2, f"{folder}/meeting", seconds=4)
    model, opt = made(window=1)
    said = Path(folder, "said")
    shares.called(opt, model, BATCHES[rank])
    opt.backward(loss_of(model, BATCHES[rank]))
    if rank == 1:
        while not leaves and not said.exists():
            time.sleep(0.05)
        os._exit(0)
    before = state_of(opt, list(model.parameters()))
    error = error_of(opt.step)
    assert state_of(opt, list(model.parameters())) == before
    said.write_text(error, encoding="utf-8")


@pytest.mark.process
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stays-away"])
def test_a_rank_that_never_closes_its_window(tmp_path, leaves):
    """A rank that never closes its window is an error after the group's timeout, not a hang"""
    ranks.spawn(alone, (str(tmp_path), leaves), 2)
    said = (tmp_path / "said").read_text(encoding="utf-8")
    contract = "the window must be closed by every process, got no answer"
    assert said.startswith(f"RuntimeError: {OP}.step: {contract}")
    assert "call step and flush on all of them" in said


@across(2)
def test_a_filler_of_weight_zero_makes_ranks_even(rank, world):
    """A micro-batch of `weight=0` fills a rank's last window and counts for nothing"""
    model, opt = made()
    share = own_share(rank, world, WINDOW)
    if rank == 1:
        share[-1] = share[-1][0], 0.0
    train(opt, model, share)
    count = 2 * WINDOW - 1
    assert opt.last.weight == sum(shares.WEIGHTS[:count])
    return as_expected(
        model, opt, train_by_hand(adam, BATCHES[:count], count, weights=shares.WEIGHTS[:count])
    )
