"""Sharded training after errors, interrupts and misuse."""

from __future__ import annotations

import pytest
import ranks
import sharded_window_faults as does
import torch
from data_parallel import BATCHES, MAX_NORM, WEIGHTS, WINDOW, adam
from support.optimizer_oracle import (
    assert_close,
    assert_equal,
    make_model,
    train_by_hand,
    window_gradient,
)

pytestmark = pytest.mark.process

WORLD = 2
OP = "AccumulatingOptimizer"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return ranks.run_on(WORLD, does.SCENARIOS, "sharded_window_faults", tmp_path_factory)


def by_hand(weights=WEIGHTS):
    """Two windows of four micro-batches of each rank."""
    count = 2 * WINDOW * WORLD
    some, theirs = BATCHES[:count], weights[:count]
    return train_by_hand(adam, some, WINDOW * WORLD, weights=theirs, max_norm=MAX_NORM)


def descent(windows):
    """The parameters after steps of gradient descent; of each window the micro-batches of a rank"""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for begin, end in windows:
        part = slice(begin * WORLD, end * WORLD)
        grads = window_gradient(model, BATCHES[part], WEIGHTS[part])
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        sgd.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("scenario", does.FAILING_STEPS, ids=lambda s: s.__name__)
def test_a_micro_batch_after_a_sharded_step_that_failed(seen, scenario):
    """A micro-batch after a sharded step that failed joins its window, and the next is its own"""
    first = ranks.agreed(seen, scenario)
    assert first["error"] == ["KeyError: 'the first'"]
    assert_close(first["joined"]["parameters"], descent([(0, 5)]))
    assert first["joined"]["stats"]["micro_batches"] == 5
    weights = WEIGHTS[: 5 * WORLD]
    assert first["joined"]["stats"]["weight"] == pytest.approx(sum(weights) / WORLD)
    assert_close(first["parameters"], descent([(0, 5), (4, 8)]))


def test_an_interrupt_while_a_held_window_is_reduced(seen):
    """Ctrl-C while FSDP reduces a held window drops it and says so; training goes on"""
    first = ranks.agreed(seen, does.reduction_that_fails)
    note = f"{OP}.backward: the open window was dropped: it had been added to"
    if does.FINALIZES:
        note = f"{OP}.step: the open window was dropped: it was being reduced"
    assert first["error"] == ["KeyboardInterrupt: ", note]
    assert first["held"] == 0
    assert not any(first["left"])
    assert_close(first["parameters"], by_hand())


@pytest.mark.parametrize("scenario", does.AS_USUAL, ids=lambda s: s.__name__)
def test_training_goes_on_as_in_one_process(seen, scenario):
    """Sharded training after such errors, or evaluation in a window, is that of one process"""
    assert_close(ranks.agreed(seen, scenario)["parameters"], by_hand())


def test_an_exception_before_the_first_forward(seen):
    """An exception inside the first `micro_batch`, before its forward, is the user's own"""
    for rank in seen:
        assert rank["exception_before_the_first_forward"]["error"] == ["KeyError: 'no batch'"]


def test_a_part_of_a_sharded_model(seen):
    """`micro_batch` of a part of what FSDP gathers together is an error"""
    for rank in seen:
        assert rank["part_of_a_model"]["error"] == [
            f"ValueError: {OP}.micro_batch: model must be all of what FSDP gathers together, where "
            "synchronize='window', got a part of it"
        ]


def test_copies_of_a_window_that_fsdp_holds(seen):
    """Copies, pickles and `main_grad` of a window that FSDP holds are errors in words"""
    for rank in seen:
        for error, name in zip(
            rank["copied_while_held"]["errors"],
            ("__getstate__", "__getstate__", "main_grad"),
            strict=True,
        ):
            assert error == [
                f"RuntimeError: {OP}.{name}: the window must be closed, where FSDP holds its "
                "gradients unreduced, got an open one. Do this where opt.stepped is true"
            ]


def test_a_flush_where_one_rank_has_dropped_its_window(seen):
    """A `flush` where one rank has discarded its micro-batches is an error on all, not a hang"""
    for number, rank in enumerate(seen):
        for error, held, seconds in rank["one_rank_discards"]["seen"]:
            assert error[0].startswith(
                f"RuntimeError: {OP}.flush: the window must hold the same number of "
                "micro-batches on every process, got 3, 0 by rank."
            )
            assert held == (0 if number == 1 else 3)
            assert seconds < 20.0  # of 60 that a hang would take


def test_a_weight_of_zero_on_one_rank(seen):
    """`on_nonfinite="raise"` with a weight of zero on one rank: all look at the gradients"""
    weights = list(WEIGHTS)
    weights[WORLD] = 0.0  # the second micro-batch of the first rank
    assert_close(ranks.agreed(seen, does.zero_weight_on_one_rank)["parameters"], by_hand(weights))


def test_a_run_that_is_resumed_where_a_window_is_closed(seen):
    """A sharded run is resumed where a window is closed, bit for bit"""
    first = ranks.agreed(seen, does.resumed_where_a_window_is_closed)
    assert_equal(first["resumed"], first["parameters"])


def test_micro_batches_of_shards_read_no_device(seen):
    """Micro-batches of sharded parameters whose weights are on a device read nothing from it"""
    for rank in seen:
        for count, lists, weight in rank["reads_of_a_device"]["seen"]:
            assert (count, lists) == (0, 0)
            assert weight == pytest.approx(sum(WEIGHTS[2 * WORLD : 4 * WORLD]) / WORLD)


def test_gradients_that_fsdp_sums(seen):
    """Where FSDP sums gradients, `reduction="sum"` does too, and "mean" is refused"""
    for rank in seen:
        found = rank["gradients_that_fsdp_sums"]
        assert found["error"] == [
            f"ValueError: {OP}.micro_batch: model must average gradients over processes with "
            "reduction='mean', got set_gradient_divide_factor(1.0). Set the number of "
            "data-parallel processes, or use reduction='sum'"
        ]
        for synchronize in ("backward", "window"):
            assert_close(found[synchronize], by_hand())
