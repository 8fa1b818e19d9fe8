"""Rows of checks, made in a process that may crash or hang, and written as soon as they are there.

Where a kernel has crashed, no later call of that process can use the GPU, and one that waits for
ever cannot be stopped from within. The rest is therefore checked in a new process.
"""

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import accumext

Facts = dict[str, Any]
Checks = Iterator[tuple[str, Callable[[], Facts]]]  # names, and what raises or says what it found
Maker = Callable[[torch.device, bool], Checks]  # of the device, and whether to be quick

START = 120.0  # s, to import torch and to find the GPU


def collect(make: Maker, device: str, quick: bool, path: Path | None, patience: float) -> bool:
    """Print every row, and write all of them to `path` after each; whether all have passed.

    A row that takes more than `patience` seconds has failed.
    """
    rows: list[Facts] = []
    report: dict[str, Any] = {"rows": rows}
    done = False
    while not done:
        for kind, content in _messages(make, device, quick, len(rows), patience):
            if kind == "machine":
                report = content | report
            elif kind == "row":
                rows.append(content)
                print(*(f"{key}={value}" for key, value in content.items()), sep="  ", flush=True)
            done = kind == "end"
            write(path, report)
    return all(row["passed"] for row in rows)


def examine(name: str, check: Callable[[], Facts]) -> Facts:
    """One row; a fault is a row, too."""
    start = time.perf_counter()
    try:
        row: Facts = {"name": name, "passed": True, **check()}
    except Exception as error:
        row = {"name": name, "passed": False, "error": f"{type(error).__name__}: {error}"}
    return row | {"wall seconds": time.perf_counter() - start}


def write(path: Path | None, report: dict[str, Any]) -> None:
    """At once, and whole: a process that is cut off leaves what was there before."""
    if path is None:
        return
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _messages(
    make: Maker, device: str, quick: bool, first: int, patience: float
) -> Iterator[tuple[str, Any]]:
    """Yield the messages of a process of its own on the checks from `first` on: the "machine", each
    "row", and the "end". Where it dies, or is silent for too long, a failed row stands for its
    own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(make, device, quick, first, sender))
    process.start()
    sender.close()
    due, wait = "start", START
    try:
        while receiver.poll(wait):
            kind, content = receiver.recv()
            due = content if kind == "name" else due if kind == "machine" else None
            wait = START if kind == "machine" else patience
            if kind != "name":
                yield kind, content
            if kind == "end":
                return
        error = f"no answer within {wait:.0f} s"
    except EOFError:
        process.join()
        error = f"the process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if due is not None:
        yield "row", {"name": due, "passed": False, "error": error}
    if due == "start":
        yield "end", None


def _serve(make: Maker, device: str, quick: bool, first: int, sender: Connection) -> None:
    torch.manual_seed(0)
    machine = {
        "torch": torch.__version__,
        "backend": accumext.backend(),
        "reason": accumext.backend_reason(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }
    sender.send(("machine", machine))
    for name, check in itertools.islice(make(torch.device(device), quick), first, None):
        sender.send(("name", name))
        row = examine(name, check)
        sender.send(("row", row))
        if not row["passed"] and _is_lost(device):
            return
    sender.send(("end", None))


def _is_lost(device: str) -> bool:
    """Tell whether a kernel has crashed: every later call would fail, too."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
