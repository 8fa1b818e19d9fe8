"""Data-parallel training (DDP, or a process group), 2 and 3 processes."""

from __future__ import annotations

import data_parallel as does
import pytest
import ranks
import torch
import traffic
from data_parallel import BATCHES, MAX_NORM, WEIGHTS, WINDOW, Branches, adam, branch_of
from support.optimizer_oracle import assert_close, assert_equal, loss_of, make_model, train_by_hand


def by_hand(world, **kwargs):
    """One process that sees the micro-batches of all."""
    return train_by_hand(adam, BATCHES, WINDOW * world, max_norm=MAX_NORM, **kwargs)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda world: f"{world}-processes")
def world(request):
    return request.param


@pytest.fixture(scope="module")
def seen(world, tmp_path_factory):
    return ranks.run_on(
        world, does.SCENARIOS + traffic.SCENARIOS, "data_parallel", tmp_path_factory
    )


@pytest.mark.parametrize("scenario", does.WEIGHTED, ids=lambda s: s.__name__)
def test_a_window_of_four_with_different_token_weights_per_rank(seen, world, scenario):
    """Window 4 on every rank, weighted by tokens, equals one process on the joined batch"""
    first = ranks.agreed(seen, scenario)
    assert_close(first["parameters"], by_hand(world, weights=WEIGHTS))
    assert first["stats"]["weight"] == sum(WEIGHTS[-WINDOW * world :])
    assert first["stats"]["micro_batches"] == WINDOW * world
    assert first["stats"]["clip_coef"] < 1.0


def test_one_process_runs_the_same_script(tmp_path_factory):
    """A script for several processes runs on one as well"""
    scenarios = (does.group_mean, does.ddp, does.ddp_while_backward_runs)
    seen = ranks.run_on(1, scenarios, "alone", tmp_path_factory)
    for scenario in scenarios:
        first = ranks.agreed(seen, scenario)
        assert_close(first["parameters"], by_hand(1, weights=WEIGHTS))


def test_sum_over_micro_batches_and_ranks(seen, world):
    """`reduction="sum"` adds over the window and over all ranks"""
    first = ranks.agreed(seen, does.group_sum)
    assert_close(first["parameters"], by_hand(world, weights=WEIGHTS, reduction="sum"))


@pytest.mark.parametrize("scenario", [does.plain_loop_in_group, does.ddp_synchronising])
def test_loops_that_know_nothing_of_ranks(seen, world, scenario):
    """DDP that synchronises every backward, and a plain loop with `process_group`, work too"""
    first = ranks.agreed(seen, scenario)
    assert_close(first["parameters"], by_hand(world))


@pytest.mark.parametrize("scenario", traffic.TRAFFIC)
def test_main_grads_travel_once_per_window(seen, world, scenario):
    """One all-reduce per window, in buckets, or while the last backward pass still runs"""
    numbers = (3 + 2 * world) * 8  # weight, micro-batches, found_inf; how each closes, and what
    bucket = (64 + 16 + 3 * 2) * 8  # a layer, its bias padded; three words per parameter
    backward = [f"gradient {number}" for number in (3, 2, 1, 0)]
    after = [numbers, *[bucket] * 4]
    for rank in seen:
        log = rank[scenario.__name__]["log"]
        if scenario is traffic.traffic_afterwards:
            assert log == 2 * (2 * backward + after)
            continue
        first, last = log[:4], log[4 : len(log) // 2]
        assert first == backward
        assert last[0] == numbers
        assert sorted(last[1:], key=str) == sorted(backward + [bucket] * 4, key=str)
        assert last.index(bucket) < last.index("gradient 1")
        assert log[len(log) // 2 :] == log[: len(log) // 2]


@pytest.mark.parametrize("scenario", traffic.READS)
def test_ranks_read_no_device(seen, world, scenario):
    """Windows of several ranks with a fused optimizer read nothing from the device"""
    first = ranks.agreed(seen, scenario)
    assert [rank[scenario.__name__]["reads"] for rank in seen] == [[0, 0]] * world
    some, weights = BATCHES[: 4 * world], WEIGHTS[: 4 * world]
    expected = train_by_hand(adam, some, 2 * world, weights=weights, max_norm=MAX_NORM)
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
    first = ranks.agreed(seen, does.half_precision)
    # In bfloat16 257 - 255 (- 255) would be 256 - 256, or less still.
    assert first["parameters"][0].tolist() == [-(257.0 - 255.0 * (world - 1))] * 2


def test_parameters_used_on_some_ranks_only(seen, world):
    """A parameter without a gradient on some ranks is stepped, one without any is left alone"""
    first = ranks.agreed(seen, does.partial_models)
    mean = [1.0 / world] * world + [3.0]
    stepped = [1.0 - 0.5 - grad for grad in mean]
    assert_close(
        first["parameters"], [torch.full((2,), s, dtype=torch.float64) for s in [*stepped, 1.0]]
    )


def test_ddp_with_one_parameter_in_a_bucket(seen):
    """DDP with `gradient_as_bucket_view`, also where a bucket is one parameter"""
    for rank in seen:
        assert rank["one_bucket"]["seen"] == [0.0, -5.5, -5.5, -11.0, -11.0, -16.5]


def test_branches_used_in_some_micro_batches_only(seen):
    """DDP parameters used in some micro-batches only need no `find_unused_parameters`"""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in (0, 12):
        optimizer.zero_grad()
        for number in range(start, start + 12):
            (model(BATCHES[number], branch_of(number)).square().mean() / 12).backward()
        optimizer.step()
    first = ranks.agreed(seen, does.branches)
    assert_close(first["parameters"], [p.detach() for p in model.parameters()])


def test_sparse_gradients_stay_sparse(seen):
    """Sparse gradients stay sparse, on ranks without any as well"""
    for rank in seen:
        moved = rank["sparse"]["moved"].tolist()
        assert moved == pytest.approx(
            [-1.0, -1.0, 0.0, -1.0, 0.0], abs=1e-5
        )  # Adam's eps takes 2e-6


def test_a_sparse_gradient_meets_a_dense_one(seen, world):
    """A parameter with a sparse gradient on one rank and a dense one on others"""
    first = ranks.agreed(seen, does.sparse_meets_dense)
    grad = torch.full((4, 2), (world - 1) / world, dtype=torch.float64)
    grad[1] += 2.0 / world
    assert_close(first["parameters"], [1.0 - 0.5 - grad])


def test_a_parameter_frozen_on_all_ranks(seen, world):
    """A parameter frozen after it got a gradient is stepped with that, as on one process"""
    first = ranks.agreed(seen, does.frozen)
    model = make_model()
    optimizer = adam(model.parameters())
    sum(loss_of(model, batch) for batch in BATCHES[:world]).div(world).backward()
    optimizer.step()
    assert_close(first["parameters"], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("scenario", does.POISONED, ids=lambda s: s.__name__)
def test_inf_skips_on_all_ranks(seen, world, scenario):
    """An inf on one rank or on all skips the window everywhere, and loss scales stay equal"""
    first = ranks.agreed(seen, scenario)
    for rank in seen:
        assert rank[scenario.__name__]["skipped"] == [True, False]
        assert rank[scenario.__name__]["scales"] == [4.0, 4.0]
        assert rank[scenario.__name__]["names"] == [[0, 1, 2, 3], []]
    good = BATCHES[2 * world : 4 * world]
    assert_close(first["parameters"], train_by_hand(adam, good, 2 * world))


def test_inf_on_all_ranks_skips_a_fused_optimizer(seen):
    """An inf on all ranks skips a fused optimizer"""
    first = ranks.agreed(seen, does.inf_with_a_fused_optimizer)
    assert_equal(first["parameters"], [p.detach() for p in make_model(torch.float32).parameters()])
    for rank in seen:
        assert rank["inf_with_a_fused_optimizer"]["skipped"] == [True]
        assert rank["inf_with_a_fused_optimizer"]["scales"] == [4.0]


@pytest.mark.parametrize("scenario", does.DROPPING, ids=lambda s: s.__name__)
def test_bad_micro_batches_of_one_rank_are_dropped_alone(seen, world, scenario):
    """`"skip_micro_batch"` drops bad micro-batches of one rank and renormalises on all"""
    first = ranks.agreed(seen, scenario)
    bad = [1] if scenario is does.bad_micro_batch_on_one_rank else [1, 1 + world]
    good = [batch for n, batch in enumerate(BATCHES[: 2 * world]) if n not in bad]
    assert_close(first["parameters"], train_by_hand(adam, good, len(good)))
    assert first["stats"]["micro_batches"] == len(good)
    assert [rank[scenario.__name__]["scale"] for rank in seen] == [4.0] * world


def test_flush_steps_on_a_partial_window_of_all_ranks(seen, world):
    """`flush()` steps on what all ranks hold, and does nothing on an empty window"""
    first = ranks.agreed(seen, does.even_flush)
    batches = BATCHES[: 3 * world]
    assert_close(first["parameters"], train_by_hand(adam, batches, 2 * world, max_norm=MAX_NORM))
    assert first["stats"]["micro_batches"] == world
    assert first["stepped"] == [True, False]


def test_copies_do_not_forget_that_a_window_is_to_be_summed(seen):
    """A copy, pickle or saved window of `micro_batch(ddp)` refuses to step on its own share"""
    for rank in seen:
        assert all(rank["copies"]["same"])
        assert len(rank["copies"]["errors"]) == 3
        assert all("the group must be known" in error for error in rank["copies"]["errors"])


def test_copies_go_on_in_their_process_group(seen, world):
    """`copy.deepcopy` and `pickle` in the middle of a window keep the default process group"""
    first = ranks.agreed(seen, does.copies_in_a_group)
    assert_close(first["parameters"], by_hand(world, weights=WEIGHTS))
