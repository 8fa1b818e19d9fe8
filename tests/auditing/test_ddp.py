"""Two processes (gloo, CPU): what DistributedDataParallel sends, weighs, forgets; and shards."""

import pytest
import ranks
import torch
from ddp_loops import ALL, GIVEN, RIGHT, SCENARIOS, WINDOWS, WRONG_PROCESSES
from support.optimizer_oracle import assert_equal

WORLD = 2

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return ranks.run_on(WORLD, ALL, "audited", tmp_path_factory)


@pytest.mark.parametrize("name", RIGHT)
def test_right(seen, name):
    """no_sync, a mean over the labels of all ranks, by hand, the wrapper, fully_shard: nothing"""
    assert ranks.of(seen, name, "findings") == [[]] * WORLD
    assert ranks.of(seen, name, "questions") == [[]] * WORLD
    assert ranks.of(seen, name, "windows") == [WINDOWS] * WORLD


@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(seen, name):
    """The parameters of every rank are those without the audit"""
    for rank in seen:
        assert_equal(rank[name]["watched"], rank[name]["plain"])


@pytest.mark.parametrize("name", WRONG_PROCESSES)
def test_wrong(seen, name):
    """Every rank says one thing, the same: by its id, its size to 1 %, and a line of the loop"""
    id, size, asks = WRONG_PROCESSES[name]
    said = [(rank[name]["questions"], rank[name]["findings"]) for rank in seen]
    assert said[0] == said[1]
    about, nothing = said[0] if asks else said[0][::-1]
    assert nothing == []
    assert [found[:2] for found in about] == [(id, pytest.approx(size, rel=0.01))]
    assert about[0][2].startswith(("ddp_loops.py:", "audited.py:"))


@pytest.mark.parametrize("given", GIVEN)
def test_never_reduced(seen, given):
    """no_sync around everything: every rank trains a model of its own"""
    assert not torch.equal(*ranks.of(seen, f"never-{given}", "gradient"))


def test_stopped(seen):
    """Processes are compared also where the audit ends the loop"""
    assert [rank["stopped"] for rank in seen] == [[("processes.not_reduced", 4.0)]] * WORLD
