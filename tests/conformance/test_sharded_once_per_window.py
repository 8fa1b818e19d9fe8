"""Sharded training that communicates once per window (`synchronize="window"`), 2 to 4 processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ranks
import sharded_windows as does
import torch
from data_parallel import BATCHES, MAX_NORM, WEIGHTS, WINDOW, adam
from support.optimizer_oracle import (
    assert_close,
    make_model,
    train_by_hand,
    window_gradient,
    windows_of,
)

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

pytestmark = pytest.mark.process

# float32 main gradients of bfloat16 activations and weights, whose products are rounded to 8 bits.
HALF = {"rtol": 0.05, "atol": 0.01}

REFUSED = (
    "the window must be full to be synchronised, or torch 2.15 or later, got a part of one, with "
    f"torch {torch.__version__}. Call opt.discard(), or use synchronize='backward'"
)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda world: f"{world}-processes")
def world(request):
    return request.param


@pytest.fixture(scope="module")
def seen(world, tmp_path_factory):
    return ranks.run_on(world, does.SCENARIOS, "sharded_window", tmp_path_factory)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    return ranks.run_on(4, does.HYBRIDS, "hybrid_window", tmp_path_factory)


def by_hand(world, count=None, window=WINDOW, **kwargs):
    options = {"weights": WEIGHTS[:count], "max_norm": MAX_NORM, **kwargs}
    return train_by_hand(adam, BATCHES[:count], window * world, **options)


@pytest.mark.parametrize("scenario", does.EQUAL, ids=lambda s: s.__name__)
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
        first = ranks.agreed(seen, does.a_partial_window_is_refused)
        assert first["errors"][0] == f"AccumulatingOptimizer.flush: {REFUSED}"
        assert first["held"] == 3
        assert_close(first["parameters"], by_hand(world, 8 * world))
        return
    first = ranks.agreed(seen, does.partial_windows)
    model = make_model()
    optimizer = adam(model.parameters())
    for begin, end in ((0, 3), (3, 7), (7, 8)):
        some = slice(begin * world, end * world)
        grads = window_gradient(model, BATCHES[some], WEIGHTS[some])
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad * min(1.0, MAX_NORM / (float(norm) + 1e-6))
        optimizer.step()
    assert_close(first["parameters"], [p.detach() for p in model.parameters()])
    assert first["stats"]["micro_batches"] == 1
    for rank in seen:  # of three micro-batches
        once = rank["counted_partial_window"]["counts"]
        assert once == {"all-gathers": 8, "reduce-scatters": 2, "all-reduces": 2}


def test_a_window_is_sent_once(seen):
    """A window of 4, 2 groups: 10 all-gathers instead of 16, 2 reduce-scatters instead of 8"""
    for rank in seen:
        usual = rank["counted_every_backward"]["counts"]
        assert usual == {"all-gathers": 16, "reduce-scatters": 8, "all-reduces": 2}
        once = rank["counted_once_per_window"]["counts"]
        assert once == {"all-gathers": 10, "reduce-scatters": 2, "all-reduces": 2}


def test_an_inf_on_one_rank_skips_the_window_on_all(seen, world):
    """An inf on one rank skips the window on all of them, and loss scales stay equal"""
    first = ranks.agreed(seen, does.inf_on_one_rank)
    for rank in seen:
        assert rank["inf_on_one_rank"]["skipped"] == [True, False]
        assert rank["inf_on_one_rank"]["scale"] == 4.0
    good, weights = BATCHES[2 * world : 4 * world], WEIGHTS[2 * world : 4 * world]
    assert_close(first["parameters"], train_by_hand(adam, good, 2 * world, weights=weights))


def test_an_exception_drops_the_window(seen, world):
    """An exception inside `micro_batch` drops the window and says so; training goes on"""
    first = ranks.agreed(seen, does.an_exception)
    assert first["notes"] == [
        "AccumulatingOptimizer.micro_batch: the open window was dropped: FSDP holds it in one sum"
    ]
    assert first["held"] == 0
    assert_close(first["parameters"], by_hand(world, 8 * world))


@pytest.mark.skipif(not does.RECOVERS, reason="FSDP recovers from torch 2.13 on")
def test_an_exception_in_the_middle_of_a_backward_pass(seen, world):
    """So does one in the middle of a backward pass, of which FSDP recovers (torch 2.13)"""
    first = ranks.agreed(seen, does.an_exception_in_backward)
    assert_close(first["parameters"], by_hand(world, 8 * world))


def test_frozen_parameters_of_windows_that_are_sent_once(seen, world):
    """Frozen parameters stay, others train as in one process"""
    first = ranks.agreed(seen, does.frozen)
    model = make_model()
    model[0].weight.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = adam(parameters)
    pairs = list(zip(BATCHES, WEIGHTS, strict=True))
    for some in windows_of(pairs, WINDOW * world):
        losses = [model(batch).square().mean() * weight for batch, weight in some]
        grads = torch.autograd.grad(sum(losses) / sum(w for _, w in some), parameters)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad * min(1.0, MAX_NORM / (float(norm) + 1e-6))
        optimizer.step()
    assert_close(first["parameters"], [p.detach() for p in model.parameters()])


def test_a_window_that_fsdp_holds_is_saved(seen, world):
    """An open window can be saved and resumed; before torch 2.15 that is refused in words"""
    if not does.FINALIZES:
        first = ranks.agreed(seen, does.a_partial_window_is_refused)
        op = "AccumulatingOptimizer.accumulation_state_dict"
        assert first["errors"][1] == f"{op}: {REFUSED}"
        return
    first = ranks.agreed(seen, does.saved_inside)
    assert_close(first["parameters"], by_hand(world, WINDOW * world))
    assert_close(first["resumed"], by_hand(world, WINDOW * world))


def test_what_does_not_go_with_windows_that_are_sent_once(seen, world):
    """What FSDP would reduce at once, and held gradients that were cleared, are errors in words"""
    first = ranks.agreed(seen, does.misuse)
    op = "AccumulatingOptimizer"
    inside = "must be formed inside `with opt.micro_batch(model):` where synchronize='window'"
    expected = {
        "outside": f"RuntimeError: {op}.backward: gradients {inside}, got some of another pass",
        "by the user": f"RuntimeError: {op}.step: gradients {inside}, got some of another pass",
        "unsharded": f"ValueError: {op}.micro_batch: model must hold fully_shard modules where "
        "synchronize='window', got Linear",
        "empty": f"RuntimeError: {op}.micro_batch: the micro-batch must have an opt.backward where "
        "synchronize='window', got none",
        "cleared": f"RuntimeError: {op}.micro_batch: gradients that FSDP holds must stay where "
        "they are until the window is closed, got some that were cleared. Use opt.zero_grad(), "
        "not that of the model; opt.discard() drops the window",
    }
    assert first["errors"] == expected
    assert_close(first["parameters"], by_hand(world))


def test_the_memory_of_a_window_is_as_predicted(seen):
    """`window_memory` within 10 % of what is measured, for float32, mixed precision and bfloat16"""
    for rank in seen:
        for measured, predicted in rank["memory"]["memory"]:
            assert predicted == pytest.approx(measured, rel=0.1)


def test_half_precision_is_held_in_float32(seen, world):
    """bfloat16 parameters with `reduce_dtype=float32` hold float32 gradients, and have masters"""
    grads = window_gradient(make_model(), BATCHES[: WINDOW * world], [1.0] * WINDOW * world)
    for rank in seen:
        for moved, grad in zip(rank["half_precision"]["moved"], grads, strict=True):
            torch.testing.assert_close(moved.double(), grad, **HALF)


@pytest.mark.parametrize("scenario", does.EQUAL_HYBRIDS, ids=lambda s: s.__name__)
def test_hybrid_shards_equal_one_process(hybrids, scenario):
    """HSDP on a 2x2 mesh, and shards in pairs whose replicas the wrapper sums: as one process"""
    first = ranks.agreed(hybrids, scenario)
    count = len(BATCHES) // 4 // WINDOW * WINDOW * 4
    assert_close(first["parameters"], by_hand(4, count))


def test_partial_windows_of_hybrid_shards(hybrids):
    """A partial window of HSDP is sent once; before torch 2.15 it is refused"""
    first = ranks.agreed(hybrids, does.hybrid_partial_window)
    if does.FINALIZES:
        assert_close(first["parameters"], by_hand(4, 12, 3))
    else:
        assert first["error"] == f"AccumulatingOptimizer.flush: {REFUSED}"


def test_a_window_of_hybrid_shards_is_sent_once(hybrids):
    """HSDP 2x2: 10 all-gathers, 2 reduce-scatters, and 2 small all-reduces beside the gradients'"""
    for rank in hybrids:
        counts = rank["hybrid_counted"]["counts"]
        usual = {"all-gathers": 16, "reduce-scatters": 8, "all-reduces": 8 + 2}
        assert counts["usual hybrid"] == usual
        assert counts["hybrid"] == {"all-gathers": 10, "reduce-scatters": 2, "all-reduces": 2 + 2}
        # One bucket holds this model's gradients.
        expected = {"all-gathers": 10, "reduce-scatters": 2, "all-reduces": 1 + 2}
        assert counts["shards of replicas"] == expected


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
    options = {"synchronize": "window", **arguments}
    with pytest.raises(ValueError, match=f"^AccumulatingOptimizer: {text}"):
        AccumulatingOptimizer(adam(make_model().parameters()), **options)


def uneven(rank: int, folder: str) -> None:
    """Rank 1 has three of four micro-batches; each writes what the error said."""
    ranks.join(rank, 2, f"{folder}/meeting", seconds=4)
    model = does.sharded()
    opt = does.wrapped(model)
    said = ""
    try:
        does.train(opt, model, does.own_share(rank, 2)[: WINDOW - rank])
        opt.flush()
    except RuntimeError as error:
        said = str(error)
    Path(folder, f"said-{rank}").write_text(said, encoding="utf-8")
    os._exit(0)  # the group has failed


@pytest.mark.process
def test_a_rank_with_fewer_micro_batches(tmp_path):
    """A rank with fewer micro-batches is an error on all after the group's timeout, not a hang"""
    ranks.spawn(uneven, (str(tmp_path),), 2)
    said = [(tmp_path / f"said-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    op = "AccumulatingOptimizer.flush"
    assert said[0]  # in a collective of the model, which waited for the other rank's
    assert said[1].startswith(f"{op}: the window must be closed by every process, got no answer")
    assert "Give every process the same number" in said[1]
