"""Ranks that do not have equally many micro-batches."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import ranks
import torch
from data_parallel import BATCHES, adam, in_group
from support.optimizer_oracle import assert_close, assert_equal, loss_of, make_model, train_by_hand

WINDOW = 4
OP = "AccumulatingOptimizer"


def state_of(model, opt):
    """Everything that an error must leave as it was."""
    packed = opt.accumulation_state_dict()
    numbers = [packed["micro_batches"], packed["weight"], packed["unit_weight"] or 0.0]
    return [
        *(p.detach().clone() for p in model.parameters()),
        *packed["main_grads"].values(),
        torch.tensor(numbers, dtype=torch.float64),
    ]


def uneven(rank, world, counts, **kwargs):
    """Rank r has counts[r] micro-batches; then all drop what is open, and train on evenly."""
    model = make_model()
    opt = in_group(model, window=WINDOW, **kwargs)
    calls = []
    for batch in BATCHES[rank::world][: counts[rank]]:
        calls += [lambda batch=batch: opt.backward(loss_of(model, batch)), opt.step]
    seen = {"error": ""}
    start = time.monotonic()
    for call in [*calls, opt.flush]:
        before = state_of(model, opt)
        try:
            call()
        except RuntimeError as error:
            seen = {"error": str(error), "before": before, "after": state_of(model, opt)}
            break
    seen["seconds"] = time.monotonic() - start
    opt.discard()
    for batch in BATCHES[rank : WINDOW * world : world]:
        opt.backward(loss_of(model, batch))
        opt.step()
    return {**seen, "parameters": [p.detach() for p in model.parameters()], "stepped": opt.stepped}


def a_step_meets_a_flush(rank, world):
    return uneven(rank, world, [4, 3])


def flushes_with_different_counts(rank, world):
    return uneven(rank, world, [3, 2])


def flush_of_nothing(rank, world):
    return uneven(rank, world, [1, 0])


def a_last_backward_meets_a_flush(rank, world):
    return uneven(rank, world, [4, 3], reduce_in_backward=True)


SCENARIOS = (
    a_step_meets_a_flush,
    flushes_with_different_counts,
    flush_of_nothing,
    a_last_backward_meets_a_flush,
)
COUNTS = ("full with 4, 3", "3, 2", "1, 0", "full with 4, 3")  # as the error has them


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return ranks.run_on(2, SCENARIOS, "uneven", tmp_path_factory)


@pytest.mark.parametrize(("scenario", "counts"), [*zip(SCENARIOS, COUNTS, strict=True)])
def test_an_uneven_last_window_is_an_error_on_all_ranks(seen, scenario, counts):
    """A rank with fewer micro-batches ends in an error that says so, and nothing has changed"""
    contract = "the window must hold the same number of micro-batches on every process"
    for rank in seen:
        result = rank[scenario.__name__]
        assert f"{contract}, got {counts} by rank." in result["error"]
        assert result["error"].startswith(OP)
        assert "with weight=0 counts for nothing" in result["error"]
        assert_equal(result["after"], result["before"])
        assert result["seconds"] < 20.0  # of 60 that a hang would take
        assert result["stepped"]
    after = ranks.agreed(seen, scenario)["parameters"]
    assert_close(after, train_by_hand(adam, BATCHES[: 2 * WINDOW], 2 * WINDOW))


def alone(rank: int, folder: str, leaves: bool) -> None:
    """Rank 1 never closes its window: it goes, or does something else until rank 0 has given up."""
    ranks.join(rank, 2, f"{folder}/meeting", seconds=4)
    model = make_model()
    opt = in_group(model, window=1)
    said = Path(folder, "said")
    opt.backward(loss_of(model, BATCHES[rank]))
    opt.step()
    opt.backward(loss_of(model, BATCHES[rank]))
    if rank == 1:
        while not leaves and not said.exists():
            time.sleep(0.05)
        os._exit(0)
    before = state_of(model, opt)
    try:
        opt.step()
    except RuntimeError as error:
        assert_equal(state_of(model, opt), before)
        said.write_text(str(error), encoding="utf-8")


@pytest.mark.process
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stays-away"])
def test_a_rank_that_never_closes_its_window(tmp_path, leaves):
    """A rank that never closes its window is an error after the group's timeout, not a hang"""
    ranks.spawn(alone, (str(tmp_path), leaves), 2)
    said = (tmp_path / "said").read_text(encoding="utf-8")
    assert said.startswith(f"{OP}.step: the window must be closed by every process, got no answer")
    assert "call step and flush on all of them" in said


def weight_of_zero(rank, world):
    """Rank 1 fills its last window up with what counts for nothing."""
    model = make_model()
    opt = in_group(model, window=WINDOW)
    for i, batch in enumerate(BATCHES[rank : WINDOW * world : world]):
        filler = rank == 1 and i == WINDOW - 1
        opt.backward(loss_of(model, batch), weight=0.0 if filler else 1.0)
        opt.step()
    return {"parameters": [p.detach() for p in model.parameters()], "stats": opt.stats()}


def test_a_filler_of_weight_zero_makes_ranks_even(tmp_path_factory):
    """A micro-batch of `weight=0` fills a rank's last window and counts for nothing"""
    seen = ranks.run_on(2, (weight_of_zero,), "filler", tmp_path_factory)
    first = ranks.agreed(seen, weight_of_zero)
    good = BATCHES[: 2 * WINDOW - 1]
    assert_close(first["parameters"], train_by_hand(adam, good, len(good)))
    assert first["stats"]["weight"] == len(good)
