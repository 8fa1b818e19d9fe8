"""Two processes (gloo, CPU): what DistributedDataParallel sends, weighs, forgets; and shards."""

import pytest
import ranks
import torch
from audited import N, network
from ddp_loops import ALL, COUNTS, GIVEN, RIGHT, SCENARIOS, WINDOWS
from support.optimizer_oracle import assert_equal

WORLD = 2

pytestmark = pytest.mark.process
every_way = pytest.mark.parametrize("given", GIVEN)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return ranks.run_on(WORLD, ALL, "audited", tmp_path_factory)


def only(seen, name):
    """The one finding that every rank has, and its size."""
    found = [rank[name]["findings"] for rank in seen]
    assert [len(of_rank) for of_rank in found] == [1] * WORLD, found
    assert len({of_rank[0] for of_rank in found}) == 1
    ((kind, value, where),) = found[0]
    assert where.startswith(("ddp_loops.py:", "audited.py:"))
    return kind, value


@pytest.mark.parametrize("name", RIGHT)
def test_right(seen, name):
    """no_sync, a mean over the labels of all ranks, by hand, the wrapper, fully_shard: nothing"""
    assert ranks.of(seen, name, "findings") == [[]] * WORLD
    assert ranks.of(seen, name, "windows") == [WINDOWS] * WORLD


@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(seen, name):
    """The parameters of every rank are those without the audit"""
    for rank in seen:
        assert_equal(rank[name]["watched"], rank[name]["plain"])


@every_way
def test_every_time(seen, given):
    """Without no_sync three of four reductions are in vain: so many bytes of gradients"""
    numbers = sum(parameter.numel() for parameter in network().parameters())
    kind, value = only(seen, f"every_time-{given}")
    assert kind == "reduced every micro-batch"
    assert value == pytest.approx((N - 1) * numbers * 4, rel=0.01)


@every_way
def test_never(seen, given):
    """no_sync around everything: every rank trains a model of its own, with four parameters"""
    assert not torch.equal(*ranks.of(seen, f"never-{given}", "gradient"))
    assert only(seen, f"never-{given}") == ("parameters not reduced", 4)


def test_mean_of_each_rank(seen):
    """12 labels on one rank and 3 on the other: a label here weighs a fourth of one there"""
    kind, value = only(seen, "mean_of_each_rank")
    assert kind == "ranks weighted equally"
    assert value == pytest.approx(COUNTS[0] / COUNTS[1], rel=0.01)


def test_sharded(seen):
    """Gradients of shards are reduced ones, and a sum misses its divisor"""
    for ((name, value, _),) in ranks.of(seen, "sharded, undivided", "findings"):
        assert (name, value) == ("divisor missing", pytest.approx(N, rel=1e-3))


def test_stopped(seen):
    """Processes are compared also where the audit ends the loop"""
    assert [rank["stopped"] for rank in seen] == [[("parameters not reduced", 4.0)]] * WORLD
