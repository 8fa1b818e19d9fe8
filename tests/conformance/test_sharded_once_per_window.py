"""Sharded training that communicates once per window (`synchronize="window"`), 2 to 4 processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ranks
import sharded_windows as does
import torch
from shares import (
    BATCHES,
    COUNT,
    WEIGHTS,
    WINDOW,
    by_hand,
    by_windows,
    error_of,
    own_share,
)
from support.optimizer_oracle import (
    OP,
    assert_close,
    make_model,
    window_gradient,
)

pytestmark = pytest.mark.process

REFUSED = (
    "the window must be full to be synchronised, or torch 2.15 or later, got a part of one, with "
    f"torch {torch.__version__}. Call opt.discard(), or use synchronize='backward'"
)


SCENARIOS = does.SCENARIOS


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    return ranks.run_on(4, does.HYBRIDS, "hybrid_window", tmp_path_factory)


@pytest.mark.parametrize("scenario", does.EQUAL)
def test_windows_that_are_sent_once_equal_one_process(seen, world, scenario):
    """`synchronize="window"` with other weights on every rank equals one process"""
    first = ranks.agreed(seen, scenario)
    assert_close(first["parameters"], by_hand(world))
    assert first["stats"]["clip_coef"] < 1.0
    assert first["stats"]["weight"] == pytest.approx(sum(WEIGHTS[-WINDOW * world :]) / world)
    assert first["stats"]["micro_batches"] == WINDOW


def test_partial_windows_that_are_sent_once(seen, world):
    """`flush` sends a partial window once; before torch 2.15 it is refused and can be dropped"""
    if not does.FINALIZES:
        first = ranks.agreed(seen, "a_partial_window_is_refused")
        assert first["errors"][0] == f"RuntimeError: {OP}.flush: {REFUSED}"
        assert first["dropped"] == 3
        assert_close(first["parameters"], by_hand(world, 0, 8))
        return
    first = ranks.agreed(seen, "partial_windows")
    assert_close(first["parameters"], by_windows(world, (0, 3), (3, 7), (7, 8)))
    assert first["stats"]["micro_batches"] == 1
    for once in ranks.of(seen, "counted_partial_window", "counts"):  # of three micro-batches
        assert once == {"all-gathers": 8, "reduce-scatters": 2, "all-reduces": 2}


def test_a_window_is_sent_once(seen):
    """A window of 4, 2 groups: 10 all-gathers instead of 16, 2 reduce-scatters instead of 8"""
    for usual in ranks.of(seen, "counted_every_backward", "counts"):
        assert usual == {"all-gathers": 16, "reduce-scatters": 8, "all-reduces": 2}
    for once in ranks.of(seen, "counted_once_per_window", "counts"):
        assert once == {"all-gathers": 10, "reduce-scatters": 2, "all-reduces": 2}


def test_an_inf_on_one_rank_skips_the_window_on_all(seen, world):
    """An inf on one rank skips the window on all of them, and loss scales stay equal"""
    first = ranks.agreed(seen, "inf_on_one_rank")
    for closed in ranks.of(seen, "inf_on_one_rank", "closed"):
        assert [report[:2] for report in closed] == [(True, 4.0), (False, 4.0)]
    assert_close(first["parameters"], by_hand(world, 2, 4, 2, max_norm=None))


def test_an_exception_drops_the_window(seen, world):
    """An exception inside `micro_batch` drops the window and says so; training goes on"""
    first = ranks.agreed(seen, "an_exception")
    dropped = f"{OP}.micro_batch: the open window was dropped: FSDP holds it in one sum"
    assert first["error"] == f"KeyError: \n{dropped}"
    assert first["left"] == 0
    assert_close(first["parameters"], by_hand(world, 0, 8))


@pytest.mark.skipif(not does.RECOVERS, reason="FSDP recovers from torch 2.13 on")
def test_an_exception_in_the_middle_of_a_backward_pass(seen, world):
    """So does one in the middle of a backward pass, of which FSDP recovers (torch 2.13)"""
    first = ranks.agreed(seen, "an_exception_in_backward")
    assert_close(first["parameters"], by_hand(world, 0, 8))


def test_frozen_parameters_of_windows_that_are_sent_once(seen, world):
    """Frozen parameters stay, others train as in one process"""
    first = ranks.agreed(seen, "frozen")
    model = make_model()
    model[0].weight.requires_grad_(False)
    windows = [(n, n + WINDOW) for n in range(0, COUNT // world, WINDOW)]
    assert_close(first["parameters"], by_windows(world, *windows, model=model))


def test_a_window_that_fsdp_holds_is_saved(seen, world):
    """An open window can be saved and resumed; before torch 2.15 that is refused in words"""
    if not does.FINALIZES:
        first = ranks.agreed(seen, "a_partial_window_is_refused")
        text = f"RuntimeError: {OP}.accumulation_state_dict: {REFUSED}"
        assert first["errors"][1] == text
        return
    first = ranks.agreed(seen, "saved_inside")
    assert_close(first["parameters"], by_hand(world, 0, WINDOW))
    assert_close(first["resumed"], by_hand(world, 0, WINDOW))


def test_what_does_not_go_with_windows_that_are_sent_once(seen, world):
    """Gradients that FSDP would reduce at once, and held ones that were cleared, are errors in
    words"""
    first = ranks.agreed(seen, "misuse")
    inside = "must be formed inside `with opt.micro_batch(model):` where synchronize='window'"
    expected = {
        "outside": f"RuntimeError: {OP}.backward: gradients {inside}, got some of another pass",
        "by the user": f"RuntimeError: {OP}.step: gradients {inside}, got some of another pass",
        "unsharded": f"ValueError: {OP}.micro_batch: model must hold fully_shard modules where "
        "synchronize='window', got Linear",
        "empty": f"RuntimeError: {OP}.micro_batch: the micro-batch must have an opt.backward where "
        "synchronize='window', got none",
        "cleared": f"RuntimeError: {OP}.micro_batch: gradients that FSDP holds must stay where "
        "they are until the window is closed, got some that were cleared. Use opt.zero_grad(), "
        "not that of the model; opt.discard() drops the window",
    }
    assert first["errors"] == expected
    assert_close(first["parameters"], by_hand(world))


def test_the_memory_of_a_window_is_as_predicted(seen):
    """`window_memory` within 10 % of what is measured, for float32, mixed precision and bfloat16"""
    for measurements in ranks.of(seen, "memory", "memory"):
        for measured, predicted in measurements:
            assert predicted == pytest.approx(measured, rel=0.1)


def test_half_precision_is_held_in_float32(seen, world):
    """bfloat16 parameters with `reduce_dtype=float32` hold float32 gradients, and have masters"""
    grads = window_gradient(make_model(), BATCHES[: WINDOW * world], WEIGHTS)
    for moved in ranks.of(seen, "half_precision", "moved"):
        # Activations, weights and their products are rounded to 8 bits.
        torch.testing.assert_close([m.double() for m in moved], grads, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("scenario", does.EQUAL_HYBRIDS)
def test_hybrid_shards_equal_one_process(hybrids, scenario):
    """HSDP on a 2x2 mesh, and shards in pairs whose replicas the wrapper sums: as one process"""
    first = ranks.agreed(hybrids, scenario)
    assert_close(first["parameters"], by_hand(4, 0, WINDOW))


def test_partial_windows_of_hybrid_shards(hybrids):
    """A partial window of HSDP is sent once; before torch 2.15 it is refused"""
    first = ranks.agreed(hybrids, "hybrid_partial_window")
    if does.FINALIZES:
        assert_close(first["parameters"], by_hand(4, 0, 3))
    else:
        assert first["error"] == f"RuntimeError: {OP}.flush: {REFUSED}"


def test_a_window_of_hybrid_shards_is_sent_once(hybrids):
    """HSDP 2x2: 10 all-gathers, 2 reduce-scatters, and 2 small all-reduces beside the gradients'"""
    expected = {"all-gathers": 10, "reduce-scatters": 2, "all-reduces": 2 + 2}
    every_backward = {"all-gathers": 16, "reduce-scatters": 8, "all-reduces": 8 + 2}
    for rank in hybrids:
        assert rank["usual"]["counts"] == every_backward
        assert rank["once"]["counts"] == expected
        # One bucket holds this model's gradients.
        assert rank["replicas"]["counts"] == {**expected, "all-reduces": 1 + 2}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"on_nonfinite": "raise"}, "on_nonfinite must be 'skip_window' for synchronize='window'"),
        ({"accumulate_in_backward": True}, "accumulate_in_backward must be False for"),
        ({"reduce_in_backward": True}, "reduce_in_backward must be False for synchronize='window'"),
        ({"synchronize": "step"}, "synchronize must be one of 'backward', 'window', got 'step'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_go_with_it(arguments, text):
    """Policies that look at every micro-batch's gradient are refused with `synchronize="window"`"""
    with pytest.raises(ValueError, match=f"^AccumulatingOptimizer: {text}"):
        does.wrapped(make_model(), **arguments)


def uneven(rank: int, folder: str) -> None:
    """Rank 1 has three of four micro-batches; each writes what the error said."""
    ranks.join(rank, 2, f"{folder}/meeting", seconds=4)
    model, opt = does.training()

    def run():
        does.train(opt, model, own_share(rank, 2, WINDOW - rank))
        opt.flush()

    said = error_of(run)
    Path(folder, f"said-{rank}").write_text(said, encoding="utf-8")
    os._exit(0)  # the group has failed


@pytest.mark.process
def test_a_rank_with_fewer_micro_batches(tmp_path):
    """A rank with fewer micro-batches is an error on all after the group's timeout, not a hang"""
    ranks.spawn(uneven, (str(tmp_path),), 2)
    said = [(tmp_path / f"said-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert said[0]  # in a collective of the model, which waited for the other rank's
    text = f"RuntimeError: {OP}.flush: the window must be closed by every process, got no answer"
    assert said[1].startswith(text)
    assert "Give every process the same number" in said[1]
