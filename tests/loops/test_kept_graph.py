"""The size of a graph, by the sizes of few of its steps, beside the sum of all."""

import pytest
import torch

from accumext.loops import _kept_graph
from accumext.loops._kept_graph import KeptGraph

CPU = torch.device("cpu")


def kept_until(sizes: list[int], budget: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many steps of these bytes are kept within the budget."""
    asked = []
    monkeypatch.setattr(_kept_graph, "ALWAYS_KEPT", 0)
    monkeypatch.setattr(_kept_graph, "free_memory", lambda device: asked.append(device) or free)
    graph, done = KeptGraph(len(sizes)), 0
    while done < len(sizes):
        ahead, measured = graph.ahead()
        now = min(ahead, len(sizes) - done)
        done += now
        free = 4 * budget - sum(sizes[:done])
        if not measured:
            graph.add(now)
        elif not graph.fits(now, sizes[done - 1], CPU):
            break
    assert asked == [CPU]  # once, as the graph itself takes of it
    return done


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 13, 14, 15, 200])
def test_equal_steps_are_kept_if_they_fit(steps, monkeypatch):
    assert kept_until([10] * steps, 10 * steps, monkeypatch) == steps
    assert kept_until([10] * steps, 10 * steps - 1, monkeypatch) == min(steps, 3)


@pytest.mark.parametrize("steps", [50, 200, 1000])
def test_growing_steps_are_kept_if_they_fit(steps, monkeypatch):
    """From the second measurement on it is known how they grow."""
    sizes = [100 + 7 * t for t in range(steps)]
    assert kept_until(sizes, int(1.02 * sum(sizes)), monkeypatch) == steps
    assert kept_until(sizes, int(0.98 * sum(sizes)), monkeypatch) == 14


@pytest.mark.parametrize("steps", [60, 200, 1000])
def test_steps_that_grow_faster_are_recorded_in_time(steps, monkeypatch):
    sizes = [t * t for t in range(steps)]
    done = kept_until(sizes, sum(sizes) // 4, monkeypatch)
    assert sum(sizes[:done]) < sum(sizes) // 4


def test_steps_that_shrink_are_kept(monkeypatch):
    sizes = [1000 - t for t in range(500)]
    assert kept_until(sizes, 1000 * 500, monkeypatch) == 500


def test_a_small_graph_is_kept_without_a_look(monkeypatch):
    monkeypatch.delattr(_kept_graph, "free_memory")
    assert KeptGraph(100).fits(3, 2**24 // 100, CPU)
