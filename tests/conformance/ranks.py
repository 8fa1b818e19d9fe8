"""Tests that several processes (gloo, CPU) run together.

A test is a function of its rank and the number of ranks, and asserts there. The tests of a file are
one registry, which one start of the processes runs from the first to the last.
"""

import importlib
import multiprocessing
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed as dist
from support.once import once
from torch.multiprocessing.spawn import ProcessException

from accumext.distributed import _all_reduce
from accumext.optimizer import _collecting

PRELOADED = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.nn",  # before there is a group, which its default arguments would keep
    "pytest",
    "accumext",
]
Scenario: TypeAlias = Callable[[int, int], Any]  # of a rank, and the number of processes


class Registered(NamedTuple):
    """A test with one of its cases."""

    run: Scenario
    worlds: tuple[int, ...]


REGISTRY: dict[str, dict[str, Registered]] = defaultdict(dict)  # of each file


def across(
    *worlds: int, cases: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make `body(rank, world, **case)` a test that these numbers of processes run, for every case.

    Its assertions stand behind its collectives, or fail on all ranks: nobody waits for a rank that
    has left. What it returns, of tensors and numbers, must be the same on every rank.
    """

    def register(body: Callable[..., Any]) -> Callable[..., None]:
        module, params = body.__module__, []
        for case, options in (cases or {"": {}}).items():
            name = f"{body.__name__}-{case}"
            REGISTRY[module][name] = Registered(partial(body, **options), worlds)
            params += [(world, name, f"{world}-processes-{case}".rstrip("-")) for world in worlds]
        # Two processes run by default.
        marked = [pytest.mark.full] if len(worlds) > 1 else []
        params = [
            pytest.param(world, name, id=id, marks=marked * (world > 2))
            for world, name, id in params
        ]

        @pytest.mark.parametrize(("world", "name"), params)
        def test(world: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
            mine = {n: partial(checked, module, n) for n in REGISTRY[module]}
            mine = {n: run for n, run in mine.items() if world in REGISTRY[module][n].worlds}
            results = of(run_on(world, mine, module, tmp_path_factory), name)
            for rank, (failure, result) in enumerate(results):
                assert not failure, f"rank {rank}: {failure}"
                exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
                torch.testing.assert_close(result, results[0][1], **exactly)

        return test

    return register


def checked(module: str, name: str, rank: int, world: int) -> tuple[str, Any]:
    """Run a test of the registry; return how it failed, and what it returned."""
    importlib.import_module(module)
    try:
        return "", REGISTRY[module][name].run(rank, world)
    except AssertionError:
        traceback.print_exc()  # to be seen also where the other ranks wait for this one in vain
        return traceback.format_exc(), None


def run_on(
    world: int, scenarios: Mapping[str, Scenario], name: str, temporary: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Return the records of each rank; run once for all workers of the test session."""

    def run(folder: Path) -> None:
        try:
            spawn(work, (world, scenarios, str(folder)), world)
        except ProcessException as error:
            (folder / "died").write_text(str(error), encoding="utf-8")

    folder = once(temporary, f"{name}-{world}", run)
    if (folder / "died").exists():
        pytest.fail((folder / "died").read_text(encoding="utf-8"), pytrace=False)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def work(rank: int, world: int, scenarios: Mapping[str, Scenario], folder: str) -> None:
    join(rank, world, f"{folder}/meeting")
    seen = {}
    for name, scenario in scenarios.items():
        torch.manual_seed(0)
        seen[name] = scenario(rank, world)
    torch.save(seen, f"{folder}/{rank}.pt")
    leave()


def of(seen: Sequence[dict[str, Any]], scenario: str, what: str | None = None) -> list[Any]:
    """Return what every rank saw of a scenario, or one thing of it."""
    return [rank[scenario] if what is None else rank[scenario][what] for rank in seen]


@contextmanager
def small_buckets(size: int = 1) -> Iterator[None]:
    """Take in and send main gradients in pieces of this many bytes, or one tensor."""
    whole = _all_reduce.BUCKET_BYTES, _collecting.BUNDLE_BYTES
    _all_reduce.BUCKET_BYTES = _collecting.BUNDLE_BYTES = size
    try:
        yield
    finally:
        _all_reduce.BUCKET_BYTES, _collecting.BUNDLE_BYTES = whole


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
