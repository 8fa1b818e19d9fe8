"""Data-parallel training (DDP, or a process group), 2 and 3 processes."""

from __future__ import annotations

import math
from functools import partial

import data_parallel as does
import pytest
import ranks
import torch
import torch.distributed as dist
from shares import BATCHES, MAX_NORM, WEIGHTS, WINDOW, by_hand, in_group, outcome, own_share
from support.device import DeviceReads, cpu_as_device
from support.optimizer_oracle import (
    ByHand,
    adam,
    assert_close,
    assert_equal,
    loss_of,
    make_model,
    parameters_of,
    sgd,
    train_by_hand,
)
from torch import nn


def traffic(rank, world, **kwargs):
    """Bytes and kind of every collective of two windows, with the backward passes between them."""
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4)))
    log = []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kw):
        log.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kw)

    for number, layer in enumerate(model):
        layer.weight.register_hook(lambda grad, number=number: log.append(f"gradient {number}"))
    opt = in_group(model, window=2, **kwargs)
    with pytest.MonkeyPatch.context() as patch, ranks.small_buckets((64 + 8) * 8):  # a layer
        patch.setattr(dist, "all_reduce", counting)
        for _ in range(4):
            opt.backward(model(torch.ones(1, 8, dtype=torch.float64)).sum())
            opt.step()
    return {"log": log}


def without_device_reads(rank, world, **kwargs):
    """The CPU plays a device: what two windows read of it."""
    model = make_model(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    options = {"window": 2, "max_norm": MAX_NORM, "scaler": scaler, **kwargs}
    opt = in_group(model, partial(adam, fused=True), **options)
    with cpu_as_device(), DeviceReads() as reads:
        for batch, weight in own_share(rank, world, 4):
            opt.backward(loss_of(model, batch.float()), torch.tensor(weight))
            opt.step()
    return outcome(model, opt, reads=[reads.count, reads.lists])


def layouts(rank, world):
    """Parameters of every layout; the gradients that the optimizer gets are laid out like them."""

    def numbers(*shape, dtype=torch.float64):
        return torch.arange(math.prod(shape)).view(shape).to(dtype)

    parameters = [
        nn.Parameter(tensor)
        for tensor in (
            numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            numbers(3, 4).T,
            numbers(6, 4)[::2, ::2],  # has gaps, which its gradient has not
            numbers(),
            numbers(0, 3),
            numbers(2, 3, dtype=torch.complex128).T,
        )
    ]
    before = [p.detach().clone() for p in parameters]
    opt = in_group(nn.ParameterList(parameters), sgd, window=2)
    strides = []
    opt.register_step_pre_hook(lambda *args: strides.extend(p.grad.stride() for p in parameters))
    for factor in (rank + 1.0, 2.0):
        reals = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
        squares = [real.square().sum() / 2 for real in reals]
        opt.backward(sum(squares) * factor)
        opt.step()
    moved = [b - p.detach() for b, p in zip(before, parameters)]
    same = [s == torch.empty_like(p).stride() for s, p in zip(strides, parameters)]
    return {"before": before, "moved": moved, "same": same}


TRAFFIC = {
    "traffic_afterwards": traffic,
    "traffic_meanwhile": partial(traffic, reduce_in_backward=True),
}
READS = {
    "reads_at_the_step": without_device_reads,
    "reads_while_backward_runs": partial(without_device_reads, reduce_in_backward=True),
}
SCENARIOS = {**does.SCENARIOS, **TRAFFIC, **READS, "layouts": layouts}


@pytest.mark.parametrize("scenario", does.WEIGHTED)
def test_a_window_of_four_with_different_token_weights_per_rank(seen, world, scenario):
    """Window 4 on every rank, weighted by tokens, equals one process on the joined batch"""
    first = ranks.agreed(seen, scenario)
    assert_close(first["parameters"], by_hand(world))
    assert first["stats"]["weight"] == sum(WEIGHTS[-WINDOW * world :])
    assert first["stats"]["micro_batches"] == WINDOW * world
    assert first["stats"]["clip_coef"] < 1.0


def test_one_process_runs_the_same_script(tmp_path_factory):
    """A script for several processes runs on one as well"""
    names = ("group_mean", "ddp", "ddp_while_backward_runs")
    scenarios = {name: does.WEIGHTED[name] for name in names}
    (seen,) = ranks.run_on(1, scenarios, "alone", tmp_path_factory)
    for name in names:
        assert_close(seen[name]["parameters"], by_hand(1))


def test_sum_over_micro_batches_and_ranks(seen, world):
    """`reduction="sum"` adds over the window and over all ranks"""
    first = ranks.agreed(seen, "group_sum")
    assert_close(first["parameters"], by_hand(world, reduction="sum"))


@pytest.mark.parametrize("scenario", does.UNWEIGHTED)
def test_loops_that_know_nothing_of_ranks(seen, world, scenario):
    """DDP that synchronises every backward, and a plain loop with `process_group`, work too"""
    first = ranks.agreed(seen, scenario)
    assert_close(first["parameters"], by_hand(world, weights=None))


@pytest.mark.parametrize("scenario", TRAFFIC)
def test_main_grads_travel_once_per_window(seen, world, scenario):
    """One all-reduce per window, in buckets, or while the last backward pass still runs"""
    # Weight, micro-batches, found_inf; of each process how it closes, what, and eight settings.
    numbers = (3 + 10 * world) * 8
    bucket = (64 + 16 + 3 * 2) * 8  # a layer, its bias padded; three words per parameter
    backward = [f"gradient {number}" for number in (3, 2, 1, 0)]
    after = [numbers, *[bucket] * 4]
    for log in ranks.of(seen, scenario, "log"):
        if scenario == "traffic_afterwards":
            assert log == 2 * (2 * backward + after)
            continue
        first, last = log[:4], log[4 : len(log) // 2]
        assert first == backward
        assert last[0] == numbers
        assert sorted(last[1:], key=str) == sorted(backward + [bucket] * 4, key=str)
        assert last.index(bucket) < last.index("gradient 1")
        assert log[len(log) // 2 :] == log[: len(log) // 2]


@pytest.mark.parametrize("scenario", READS)
def test_ranks_read_no_device(seen, world, scenario):
    """Windows of several ranks, fused optimizer: after the first nothing is read from the device"""
    first = ranks.agreed(seen, scenario)
    assert ranks.of(seen, scenario, "reads") == [[0, 1]] * world  # settings are compared
    expected = by_hand(world, 0, 4, 2)
    # Sums and the clip are in float32, and Adam divides by the size of each element.
    assert_close([p.double() for p in first["parameters"]], expected, 1e-5)


def test_parameters_of_every_layout(seen, world):
    """Channels-last, transposed, strided, 0-dim, empty and complex parameters on several ranks"""
    mean = (sum(range(1, world + 1)) / world + 2.0) / 2
    for rank in seen:
        saw = rank["layouts"]
        assert_close(saw["moved"], [before * mean for before in saw["before"]])
        assert all(saw["same"])


def test_half_precision_sums_travel_in_float32(seen, world):
    """Half-precision gradients are summed over micro-batches and ranks in float32"""
    first = ranks.agreed(seen, "half_precision")
    # In bfloat16 257 - 255 (- 255) would be 256 - 256, or less still.
    assert first["parameters"][0].tolist() == [-(257.0 - 255.0 * (world - 1))] * 2


def test_parameters_used_on_some_ranks_only(seen, world):
    """A parameter without a gradient on some ranks is stepped, one without any is left alone"""
    first = ranks.agreed(seen, "partial_models")
    mean = [1.0 / world] * world + [3.0]
    stepped = [1.0 - 0.5 - grad for grad in mean]
    assert_close(
        first["parameters"], [torch.full((2,), s, dtype=torch.float64) for s in [*stepped, 1.0]]
    )


def test_ddp_with_one_parameter_in_a_bucket(seen):
    """DDP with `gradient_as_bucket_view`, also where a bucket is one parameter"""
    for values in ranks.of(seen, "one_bucket", "seen"):
        assert values == [0.0, -5.5, -5.5, -11.0, -11.0, -16.5]


def test_branches_used_in_some_micro_batches_only(seen):
    """DDP parameters used in some micro-batches only need no `find_unused_parameters`"""
    torch.manual_seed(0)
    model = does.Branches()
    by_hand = ByHand(model.parameters(), does.momentum)
    for number in range(24):
        by_hand.add(model(number))
        if number in (11, 23):
            by_hand.step()
    first = ranks.agreed(seen, "branches")
    assert_close(first["parameters"], parameters_of(model))


def test_sparse_gradients_stay_sparse(seen):
    """Sparse gradients stay sparse, on ranks without any as well"""
    for moved in ranks.of(seen, "sparse", "moved"):  # Adam's eps takes 2e-6
        assert moved.tolist() == pytest.approx([-1.0, -1.0, 0.0, -1.0, 0.0], abs=1e-5)


def test_a_sparse_gradient_meets_a_dense_one(seen, world):
    """A parameter with a sparse gradient on one rank and a dense one on others"""
    first = ranks.agreed(seen, "sparse_meets_dense")
    grad = torch.full((4, 2), (world - 1) / world, dtype=torch.float64)
    grad[1] += 2.0 / world
    assert_close(first["parameters"], [1.0 - 0.5 - grad])


def test_a_parameter_frozen_on_all_ranks(seen, world):
    """A parameter frozen after it got a gradient is stepped with that, as on one process"""
    first = ranks.agreed(seen, "frozen")
    assert_close(first["parameters"], train_by_hand(adam, BATCHES[:world], world))


@pytest.mark.parametrize("scenario", does.POISONED)
def test_inf_skips_on_all_ranks(seen, world, scenario):
    """An inf on one rank or on all skips the window everywhere, and loss scales stay equal"""
    first = ranks.agreed(seen, scenario)
    for closed in ranks.of(seen, scenario, "closed"):
        assert closed == [(True, 4.0, [0, 1, 2, 3]), (False, 4.0, [])]
    assert_close(first["parameters"], by_hand(world, 2, 4, 2, max_norm=None))


def test_inf_on_all_ranks_skips_a_fused_optimizer(seen):
    """An inf on all ranks skips a fused optimizer"""
    first = ranks.agreed(seen, "inf_with_a_fused_optimizer")
    assert_equal(first["parameters"], parameters_of(make_model(torch.float32)))
    for rank in seen:
        assert rank["inf_with_a_fused_optimizer"]["skipped"]
        assert rank["inf_with_a_fused_optimizer"]["scale"] == 4.0


@pytest.mark.parametrize("scenario", does.DROPPING)
def test_bad_micro_batches_of_one_rank_are_dropped_alone(seen, world, scenario):
    """`"skip_micro_batch"` drops bad micro-batches of one rank and renormalises on all"""
    first = ranks.agreed(seen, scenario)
    bad = [1] if scenario == "bad_micro_batch_on_one_rank" else [1, 1 + world]
    good = [number for number in range(2 * world) if number not in bad]
    batches, weights = zip(*((BATCHES[number], WEIGHTS[number]) for number in good))
    assert_close(first["parameters"], train_by_hand(adam, batches, len(good), weights=weights))
    assert first["stats"]["micro_batches"] == len(good)
    assert ranks.of(seen, scenario, "scale") == [4.0] * world


def test_flush_steps_on_a_partial_window_of_all_ranks(seen, world):
    """`flush()` steps on what all ranks hold, and does nothing on an empty window"""
    first = ranks.agreed(seen, "even_flush")
    assert_close(first["parameters"], by_hand(world, 0, 3, 2))
    assert first["stats"]["micro_batches"] == world
    assert first["flushed"] == [True, False]


def test_copies_do_not_forget_that_a_window_is_to_be_summed(seen):
    """A copy, pickle or saved window of `micro_batch(ddp)` refuses to step on its own share"""
    for rank in seen:
        assert all(rank["copies"]["same"])
        assert len(rank["copies"]["errors"]) == 3
        assert all("the group must be known" in error for error in rank["copies"]["errors"])


def test_copies_go_on_in_their_process_group(seen, world):
    """`copy.deepcopy` and `pickle` in the middle of a window keep the default process group"""
    first = ranks.agreed(seen, "copies_in_a_group")
    assert_close(first["parameters"], by_hand(world))
