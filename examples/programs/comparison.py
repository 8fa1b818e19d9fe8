"""Two ways to the same gradients, beside each other: how far apart, how long, how much memory."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accumext._peak_memory import peak_memory

EXACT = 1e-12  # how far apart gradients in float64 may be, relatively

Way = Callable[[nn.Module, Any], Any]  # (model, batch) -> the loss, or a tuple that begins with it
Case = tuple[nn.Module, Any]  # the model and the batch


def wants_quick(description: str | None) -> bool:
    """The command line: whether tiny sizes will do."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one run: for tests")
    return parser.parse_args().quick


def compare(
    plain: Way, accumext: Way, *, exact: Case, timed: Case, title: str = "", runs: int = 3
) -> None:
    """Print both ways' seconds and peak memory, and how far apart their gradients are.

    `exact` is in float64 and small, and what is said of the gradients is found there. `timed` is
    run once by each way without a clock, and then `runs` times in turn; the median is printed. Both
    ways draw the same random numbers.
    """
    pairs = list(zip(gradients(accumext, *exact), gradients(plain, *exact), strict=True))
    apart = sum(float((mine - theirs).square().sum()) for mine, theirs in pairs)
    distance = math.sqrt(apart / sum(float(theirs.square().sum()) for _, theirs in pairs))
    ways = {"plain PyTorch": plain, "accumext": accumext}
    model, batch = timed
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        model.zero_grad()  # before, not in the call: the gradients count
        peaks[name] = peak_memory(lambda way=way: backward(way, model, batch))
    for _ in range(runs):
        for name, way in ways.items():
            model.zero_grad()
            begin = time.perf_counter()
            backward(way, model, batch)
            seconds[name].append(time.perf_counter() - begin)

    if title:
        print(title)
    medians = [statistics.median(of_way) for of_way in seconds.values()]
    for name, median in zip(ways, medians):
        ends = f"{name:<15}{median:8.3f} s {peaks[name] / 1e6:8.1f} MB"
        if name == "accumext":
            faster, smaller = medians[0] / median, peaks["plain PyTorch"] / peaks[name]
            ends += f"   {faster:.1f} times as fast, {smaller:.1f} times less memory; "
            ends += f"gradients differ by {distance:.0e}"
        print(ends)
    if not distance < EXACT:
        raise SystemExit(f"the gradients differ by {distance:.0e}, which is more than {EXACT:.0e}")


def backward(way: Way, model: nn.Module, batch: Any) -> None:
    """Forward and backward, with the same random numbers each time."""
    torch.manual_seed(1)
    result = way(model, batch)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    loss.backward()


def gradients(way: Way, model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the gradient that a way leaves in every parameter."""
    model.zero_grad()
    backward(way, model, batch)
    return [p.grad.clone() for p in model.parameters()]
