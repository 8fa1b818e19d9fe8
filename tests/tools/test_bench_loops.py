"""The benchmark of generate, rollout and known tokens: ways are compared, figures follow."""

from typing import Any

import loops
import pytest
import torch
from _timing import Taken


def measured(job: Any, repetitions: int = 3) -> Any:
    usual = next(iter(job.ways.values()))

    def seconds_of(way):
        way()
        return Taken(2.0 if way is usual else 0.5)

    return loops.measure(job, torch.device("cpu"), seconds_of, repetitions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "rollout", "teacher", "function", "precision"])
def test_all_ways_of_a_job_do_the_same(name):
    for job in loops.JOBS[name](torch.device("cpu"), True):
        result = measured(job, repetitions=2)
        assert all(len(samples) == 2 for samples in result.seconds.values())
        assert result.memory.keys() == job.ways.keys()
        assert {against for against, _ in job.figures} <= job.ways.keys()


def test_what_computes_something_else_is_refused():
    ways = {"the loop": lambda: [torch.ones(3)], loops.OURS: lambda: [torch.ones(3) + 1e-3]}
    with pytest.raises(AssertionError, match=r"job: accumext is off by 1\.0e-03"):
        measured(loops.Job("job", ways))
    measured(loops.Job("job", ways, same=False))  # samples


def test_figures_follow_from_the_samples():
    """And a run begins without what the one before it left"""
    weight = torch.ones(2, requires_grad=True)

    def way():
        (3 * weight).sum().backward()
        return [weight.grad]

    def forget():
        weight.grad = None

    ways = {"the loop": way, loops.OURS: lambda: way()}
    job = loops.Job("job", ways, forget, figures=[("the loop", 3.0)])
    result = measured(job)
    assert weight.grad.tolist() == [3, 3]
    assert result.seconds == {"the loop": [2.0] * 3, "accumext": [0.5] * 3}
    result.seconds["accumext"][:] = [0.5, 1.0, 0.25]
    usual, ours = loops.rows_of(result)
    assert usual["times_faster"] == usual["time_over_first"] == [1.0] * 3
    assert (ours["runs"], ours["seconds"]) == (3, [0.375, 0.5, 0.75])
    assert (ours["times_faster"], ours["time_over_first"]) == ([3, 4, 6], [0.1875, 0.25, 0.375])
    assert ours["peak_bytes"] == result.memory["accumext"] > 0
    (row,) = loops.figures_of(job, result)
    assert (row["figure"], row["target"], row["measured"]) == ("job: accumext over the loop", 3, 4)
    assert "4.00 [3.00, 6.00]" in loops.memory_table(result, "MiB", 2**20, over=False)
