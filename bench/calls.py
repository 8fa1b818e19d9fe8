"""The Python that a call runs through: its calls within the package, and its changes of file.

    python bench/calls.py [--trace]

A reader who follows a call opens a file at each change, and a small model pays for each call.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import accumext

PACKAGE = str(Path(accumext.__file__).parent)


class Trace(NamedTuple):
    """The Python functions of the package that ran, in order: (file, function).

    Attributes:
        calls: those functions.
        native: the number of C functions, torch's among them, that their own lines called.
    """

    calls: list[tuple[str, str]]
    native: int

    @property
    def changes(self) -> int:
        """Count the calls that went to another file than the one before."""
        files = [file for file, _ in self.calls]
        return sum(a != b for a, b in pairwise(files))


def traced(function: Callable[[], Any]) -> Trace:
    """Run a function and trace it."""
    calls, native = [], 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal native
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return
        native += event == "c_call"
        if event == "call":
            calls.append((os.path.relpath(file, PACKAGE), frame.f_code.co_name))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Trace(calls, native)


def through_backward(opt: accumext.AccumulatingOptimizer, loss: Tensor) -> None:
    """Run one micro-batch."""
    opt.backward(loss)
    opt.step()


def in_a_micro_batch(opt: accumext.AccumulatingOptimizer, loss: Tensor) -> None:
    """Run one micro-batch, whose passes stand in a block."""
    with opt.micro_batch():
        opt.backward(loss)
    opt.step()


def window_of(count: int, step: Callable[..., Any], **settings: Any) -> list[Trace]:
    """Trace every micro-batch of one window, with this many parameters.

    Args:
        count: parameters, of 10 elements each.
        step: `step(opt, loss)` takes one micro-batch.
        settings: of the optimizer; `dtype` of its parameters, which have masters if it is a half.
    """
    dtype = settings.pop("dtype", torch.float32)
    parameters = [nn.Parameter(torch.randn(10, dtype=dtype)) for _ in range(count)]
    adam = torch.optim.AdamW(masters := accumext.masters(parameters))
    opt = accumext.AccumulatingOptimizer(adam, masters=masters, **settings)

    def micro_batch() -> Trace:
        loss = torch.stack(list(map(torch.sum, parameters))).float().sum()
        return traced(lambda: step(opt, loss))

    for _ in range(3 * opt.window):  # the first windows are watched for mistakes
        micro_batch()
    return [micro_batch() for _ in range(opt.window)]


def decoder_passes() -> tuple[Trace, Trace]:
    """Trace `decode_loss` of a GRU fed its own argmax, and its backward pass."""
    embedding, cell, head = nn.Embedding(100, 8), nn.GRUCell(8, 16), nn.Linear(16, 100)
    targets = torch.randint(100, (12, 4))
    outputs = []

    def forward() -> None:
        outputs.append(accumext.decode_loss(embedding, cell, head, targets, feedback="greedy"))

    forward()
    outputs[-1].loss.backward()
    return traced(forward), traced(outputs[-1].loss.backward)


def main() -> None:
    """Print the numbers, and with --trace every call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true", help="print every call, too")
    args = parser.parse_args()
    forward, backward = decoder_passes()
    settings = {"window": 2, "max_norm": 1.0, "scaler": torch.amp.GradScaler("cpu")}
    traces = {
        "opt.backward and opt.step": window_of(4, through_backward, **settings)[-1],
        "decode_loss": forward,
        "its backward": backward,
    }
    for name, trace in traces.items():
        print(f"{name}: {len(trace.calls)} calls, {trace.changes} changes of file")
        for file, function in trace.calls if args.trace else ():
            print(f"    {file}: {function}")
    for step, window in itertools.product((through_backward, in_a_micro_batch), (1, 4)):
        few, many = (window_of(count, step, window=window, max_norm=1.0) for count in (4, 300))
        print(
            f"{step.__name__}, a window of {window} with a clip, by micro-batch:"
            f" {[len(trace.calls) for trace in many]} calls;"
            f" of C, with 4 parameters {[trace.native for trace in few]},"
            f" with 300 {[trace.native for trace in many]}"
        )


if __name__ == "__main__":
    main()
