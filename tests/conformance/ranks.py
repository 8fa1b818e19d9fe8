"""Scenarios that several processes (gloo, CPU) run together, and what each of them saw."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from support.once import once
from support.optimizer_oracle import assert_equal

from accumext.optimizer import _backward, _processes

PRELOADED = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.nn",  # before there is a group, which its default arguments would keep
    "pytest",
    "accumext",
]

THREE = pytest.param(3, marks=pytest.mark.full)  # processes: two run by default
Scenario: TypeAlias = Callable[[int, int], dict[str, Any]]  # rank, number of processes
Scenarios: TypeAlias = Mapping[str, Scenario]


@contextmanager
def small_buckets(size: int = 1) -> Iterator[None]:
    """Main gradients are taken in and sent in pieces of this many bytes, or one tensor."""
    whole = _processes.BUCKET_BYTES, _backward.BUNDLE_BYTES
    _processes.BUCKET_BYTES = _backward.BUNDLE_BYTES = size
    try:
        yield
    finally:
        _processes.BUCKET_BYTES, _backward.BUNDLE_BYTES = whole


def spawn(function: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """Run `function(rank, *args)` in new processes, which need not import torch each by itself."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(function, args, world, start_method="forkserver")


def join(rank: int, world: int, meeting: str, seconds: float = 60) -> None:
    """Make the processes that name the same file, which is not there yet, a group."""
    torch.set_num_threads(1)
    # As in pyproject.toml, which these processes do not read.
    said = r"AccumulatingOptimizer: (?!it ended with|a window was skipped)"
    warnings.filterwarnings("error", said)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


def leave() -> None:
    """End the group, once every process has done its part.

    A thread of gloo that drops a tensor while the interpreter shuts down aborts the process
    (https://github.com/pytorch/pytorch/issues/190489); a child of a fork server does not shut it
    down.
    """
    dist.barrier()
    dist.destroy_process_group()


def named(*functions: Scenario) -> Scenarios:
    """Scenarios that are called like their functions."""
    return {function.__name__: function for function in functions}


def work(rank: int, world: int, scenarios: Scenarios, folder: str) -> None:
    join(rank, world, f"{folder}/meeting")
    seen = {}
    for name, scenario in scenarios.items():
        torch.manual_seed(0)
        seen[name] = scenario(rank, world)
    torch.save(seen, f"{folder}/{rank}.pt")
    leave()


def run_on(
    world: int,
    scenarios: Scenarios | Sequence[Scenario],
    name: str,
    temporary: pytest.TempPathFactory,
) -> list[dict[str, dict[str, Any]]]:
    """Return the records of each rank; run once for all workers of the test session."""
    scenarios = scenarios if isinstance(scenarios, Mapping) else named(*scenarios)

    def run(folder: Path) -> None:
        spawn(work, (world, scenarios, str(folder)), world)

    folder = once(temporary, f"{name}-{world}", run)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def of(seen: Sequence[dict[str, dict[str, Any]]], scenario: str, what: str) -> list[Any]:
    """One thing that every rank saw of a scenario."""
    return [rank[scenario][what] for rank in seen]


def agreed(seen: Sequence[dict[str, dict[str, Any]]], scenario: Scenario | str) -> dict[str, Any]:
    """Return rank 0's record of a scenario; parameters and statistics are equal on all ranks."""
    name = scenario if isinstance(scenario, str) else scenario.__name__
    first, *others = (rank[name] for rank in seen)
    for other in others:
        if "parameters" in first:
            assert_equal(other["parameters"], first["parameters"])
        if "stats" in first:
            ours, theirs = ({**r["stats"], "loss_scale": None} for r in (first, other))
            assert str(ours) == str(theirs)  # as text, where NaN equals itself
    return first
