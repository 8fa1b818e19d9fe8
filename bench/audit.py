"""What an audit costs: time and memory of its windows beside those of the bare loop.

    python bench/audit.py [--json FILE] [--device cpu|cuda] [--quick]

A window is four micro-batches of a model of 30M parameters, clipped, and a step of AdamW. Windows
with and without an audit alternate in one process. Memory is counted from the allocations of
tensors, at the highest point of a window, over that of the bare window, in sets of gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _facts import machine
from _results import write
from torch import nn

import accumext
from accumext._peak_memory import peak_memory

MICRO_BATCHES, CLASSES = 4, 1000


def transformer(layers: int, width: int) -> nn.Module:
    layer = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0) for _ in range(layers)]
    return nn.Sequential(*layer, nn.Linear(width, CLASSES))


def perceptron(layers: int, width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, CLASSES)
    )


# name -> (model, layers, width, rows of a micro-batch): much work for a parameter, and little
CASES: dict[str, tuple[Callable[[int, int], nn.Module], int, int, int]] = {
    "transformer, 64 tokens": (transformer, 9, 512, 64),
    "perceptron, 8 rows": (perceptron, 28, 1024, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="small models, few windows")
    args = parser.parse_args()
    content: dict[str, Any] = {"machine": machine(torch.device(args.device)), "cases": {}}
    print(f"{'':24}{'window, s':>12}{'audited / bare':>16}{'sets of gradients more':>26}")
    for name, (make, layers, width, rows) in CASES.items():
        model = make(2, 64) if args.quick else make(layers, width)
        width = 64 if args.quick else width
        result = measure(model.to(args.device), width, rows, 3 if args.quick else 9)
        content["cases"][name] = result
        print(
            f"{name:24}{result['seconds']:12.3f}{result['ratio']:16.2f}{result['sets']:26.2f}",
            flush=True,
        )
    write(args.json, content)


def measure(model: nn.Module, width: int, rows: int, windows: int) -> dict[str, float]:
    """Medians of the bare window's time and of the ratio, and the peak in sets of gradients."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters())

    def window() -> None:
        for _ in range(MICRO_BATCHES):
            logits = model(torch.randn(rows, width, device=device))
            targets = torch.randint(CLASSES, (rows,), device=device)
            (F.cross_entropy(logits, targets) / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def audited() -> Any:
        return accumext.audit(model, optimizer, windows=1)

    for context in (nullcontext, audited):
        timed(window, context, device)
    bare, ratios = [], []
    for _ in range(windows):
        bare.append(timed(window, nullcontext, device))
        ratios.append(timed(window, audited, device) / bare[-1])
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    more = peak(window, audited, device) - peak(window, nullcontext, device)
    return {
        "seconds": statistics.median(bare),
        "ratio": statistics.median(ratios),
        "sets": more / gradients,
    }


def timed(window: Callable[[], None], context: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    with context():
        window()
    float(torch.zeros((), device=device))  # waits for the device
    return time.perf_counter() - start


def peak(window: Callable[[], None], context: Callable[[], Any], device: torch.device) -> int:
    """Bytes of tensors at the highest point of a window, over what there was before."""

    def run() -> None:
        with context():
            window()

    return peak_memory(run, device)


if __name__ == "__main__":
    main()
