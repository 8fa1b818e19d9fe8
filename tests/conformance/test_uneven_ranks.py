"""Ranks that do not have equally many micro-batches."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from shares import (
    BATCHES,
    WEIGHTS,
    WINDOW,
    by_hand,
    called,
    error_of,
    in_group,
    made,
    outcome,
    own_share,
    train,
)
from support.optimizer_oracle import (
    OP,
    adam,
    assert_close,
    loss_of,
    make_model,
    state_of,
    train_by_hand,
)


def uneven(rank, world, counts, **kwargs):
    """Rank r has counts[r] micro-batches; then all drop what is open, and train on evenly."""
    model, opt = made(**kwargs)
    share = own_share(rank, world)
    calls = []
    for batch, weight in share[: counts[rank]]:
        calls += [partial(opt.backward, loss_of(model, batch), weight), opt.step]
    start = time.monotonic()
    for call in [*calls, opt.flush]:
        before = state_of(opt, list(model.parameters()))
        error = error_of(call)
        if error:
            break
    seen = {"error": error, "same": state_of(opt, list(model.parameters())) == before}
    seen["seconds"] = time.monotonic() - start
    opt.discard()
    train(opt, model, share[:WINDOW])
    return outcome(model, opt, **seen)


# The scenarios, with what the error says of their counts
CASES = {
    "a_step_meets_a_flush": ([4, 3], "full with 4, 3", {}),
    "flushes_with_different_counts": ([3, 2], "3, 2", {}),
    "flush_of_nothing": ([1, 0], "1, 0", {}),
    "a_last_backward_meets_a_flush": ([4, 3], "full with 4, 3", {"reduce_in_backward": True}),
}


def weight_of_zero(rank, world):
    """Rank 1 fills its last window up with what counts for nothing."""
    model, opt = made()
    share = own_share(rank, world, WINDOW)
    if rank == 1:
        share[-1] = share[-1][0], 0.0
    train(opt, model, share)
    return outcome(model, opt)


def told_differently(rank, world, **options):
    """Ranks with float64 and float32 parameters, then with different clips, then alike."""
    share, errors = own_share(rank, world, WINDOW), []
    dtype = (torch.float64, torch.float32)[rank]
    model = make_model(dtype)
    opt = in_group(model, window=1, **options)
    errors.append(error_of(partial(train, opt, model, own_share(rank, world, 1, dtype))))
    opt.discard()
    model, opt = made(window=1, max_norm=rank + 1.0, **options)
    errors.append(error_of(partial(train, opt, model, share)))
    opt.discard()
    opt.max_norm = None
    train(opt, model, share)
    return outcome(model, opt, errors=errors)


TOLD_DIFFERENTLY = {
    "told_differently": told_differently,
    "told_differently_in_backward": partial(told_differently, reduce_in_backward=True),
}
SCENARIOS = {
    "weight_of_zero": weight_of_zero,
    **TOLD_DIFFERENTLY,
    **{name: partial(uneven, counts=case[0], **case[2]) for name, case in CASES.items()},
}


@pytest.mark.parametrize("scenario", CASES)
def test_an_uneven_last_window_is_an_error_on_all_ranks(pair, scenario):
    """A rank with fewer micro-batches ends in an error that says so, and nothing has changed"""
    contract = "the window must hold the same number of micro-batches on every process"
    for rank in pair:
        result = rank[scenario]
        assert f"{contract}, got {CASES[scenario][1]} by rank." in result["error"]
        assert result["error"].startswith(f"RuntimeError: {OP}")
        assert "with weight=0 counts for nothing" in result["error"]
        assert result["same"]
        assert result["seconds"] < 20.0  # of 60 that a hang would take
        assert result["stepped"]
    after = ranks.agreed(pair, scenario)["parameters"]
    assert_close(after, by_hand(2, 0, WINDOW, max_norm=None))


@pytest.mark.parametrize("scenario", TOLD_DIFFERENTLY)
def test_ranks_that_were_told_differently(pair, scenario):
    """Ranks with other settings or dtypes end in an error that says which; alike they train on"""
    for errors in ranks.of(pair, scenario, "errors"):
        for error, name, got in zip(
            errors,
            ("parameters must have the same dtypes", "max_norm must be the same"),
            ("float64, float32", "1.0, 2.0"),
        ):
            assert error.startswith(f"RuntimeError: {OP}")
            assert error.endswith(f": {name} on every process, got {got} by rank")
    after = ranks.agreed(pair, scenario)["parameters"]
    assert_close(after, by_hand(2, 0, WINDOW, window=1, max_norm=None))


def alone(rank: int, folder: str, leaves: bool) -> None:
    """Rank 1 never closes its window: it goes, or does something else until rank 0 has given up."""
    ranks.join(rank, 2, f"{folder}/meeting", seconds=4)
    model, opt = made(window=1)
    said = Path(folder, "said")
    called(opt, model, BATCHES[rank])
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


def test_a_filler_of_weight_zero_makes_ranks_even(pair):
    """A micro-batch of `weight=0` fills a rank's last window and counts for nothing"""
    first = ranks.agreed(pair, "weight_of_zero")
    count = 2 * WINDOW - 1
    expected = train_by_hand(adam, BATCHES[:count], count, weights=WEIGHTS[:count])
    assert_close(first["parameters"], expected)
    assert first["stats"]["weight"] == sum(WEIGHTS[:count])
