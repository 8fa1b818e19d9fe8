"""Training a decoder while another process keeps a core busy, such as a worker of a data loader.

    python bench/busy.py [--json FILE] [--quick]

A GRU on its own greedy tokens and an nn.LSTM on known tokens, forward and backward, each beside the
loop that people write: T=50, B=16, H=512, V=50,000, with as many threads as torch chooses. In every
repetition each way runs once on the quiet machine, and then once beside one busy process.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import _results
import torch
from _decoders import OURS, PLAIN, Decoder, Shape, plain
from _facts import machine
from loops import module_job
from torch import nn

import accumext

SHAPE, QUICK = Shape(50, 16, 50_000, 512), Shape(6, 4, 500, 16)
MODULE = "the module"


def ways(shape: Shape) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return what is timed, by what it does and by whom."""
    greedy, lstm = Decoder(shape, "gru", torch.device("cpu")), nn.LSTM(shape.size, shape.size)
    tokens = torch.randint(shape.vocabulary, (shape.steps + 1, shape.batch))
    known = module_job("known", greedy.embedding, lstm, greedy.head, tokens).ways

    def ours() -> None:
        modules = greedy.embedding, greedy.cell, greedy.head
        accumext.decode_loss(*modules, greedy.targets, feedback="greedy").loss.backward()

    return {
        ("greedy GRU", OURS): ours,
        ("greedy GRU", PLAIN): lambda: plain(greedy),
        ("known tokens, nn.LSTM", OURS): known[OURS],
        ("known tokens, nn.LSTM", MODULE): known[MODULE],
    }


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Keep one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def timed(way: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def main() -> int:
    args = _results.parser(__doc__, "run", device=False).parse_args()
    torch.manual_seed(0)
    found = ways(QUICK if args.quick else SHAPE)
    times: dict[Any, list[tuple[float, float]]] = {name: [] for name in found}
    for way in found.values():
        way()
    for _ in range(2 if args.quick else 7):
        quiet = {name: timed(way) for name, way in found.items()}
        with busy_process():
            for name, way in found.items():
                times[name].append((quiet[name], timed(way)))
    rows = [row(name, pairs) for name, pairs in times.items()]
    _results.write(args.json, {"machine": machine(torch.device("cpu")), "rows": rows})
    for entry in rows:
        print(" | ".join(str(value) for value in entry.values()))
    return 0


def row(name: tuple[str, str], pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians of a way, and the quartiles of the ratio of its two times."""
    ratios = statistics.quantiles((busy / quiet for quiet, busy in pairs), method="inclusive")
    quiet, busy = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"job": name[0], "way": name[1], "quiet, s": quiet, "busy, s": busy, "ratio": ratios}


if __name__ == "__main__":
    sys.exit(main())
