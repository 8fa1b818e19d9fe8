"""What an audit costs: time and memory of its windows beside those of the bare loop.

    python bench/audit.py [--json FILE] [--device cpu|cuda] [--quick]

A window is four micro-batches of a model of 30M parameters, clipped, and a step of AdamW. Windows
with and without an audit take turns in one process (_timing.py). Memory is counted from the
allocations of tensors, at the highest point of a window, over that of the bare window, in sets of
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _results
import torch
import torch.nn.functional as F
from _facts import machine
from _timing import UNKNOWN, Contender, Job, Patience, Shape, clock, measure
from torch import nn

import accumext
from accumext._peak_memory import peak_memory

MICRO_BATCHES, CLASSES = 4, 1000
BARE, AUDITED = "bare", "audited"


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
    args = _results.parser(__doc__, "case").parse_args()
    device = torch.device(args.device)
    content: dict[str, Any] = {"machine": machine(device), "cases": {}}
    print(f"{'':24}{'window, s':>12}{'audited / bare':>16}{'sets of gradients more':>26}")
    for name, (make, layers, width, rows) in CASES.items():
        model = make(2, 64) if args.quick else make(layers, width)
        width = 64 if args.quick else width
        job = audit_job(name, model.to(device), width, rows)
        windows = 3 if args.quick else 9
        result = measure(job, clock(device, ahead=False), Patience(0.0, windows, windows))
        content["cases"][name] = case = {
            "seconds": result.spread(BARE).median,
            "ratio": result.ratio(BARE, AUDITED).median,
            "sets": result.memory[AUDITED] - result.memory[BARE],
        }
        print(f"{name:24}{case['seconds']:12.3f}{case['ratio']:16.2f}{case['sets']:26.2f}")
        _results.write(args.json, content)


def audit_job(name: str, model: nn.Module, width: int, rows: int) -> Job:
    """Return the job to run a window, without an audit and inside of one."""
    parameters = list(model.parameters())
    device, optimizer = parameters[0].device, torch.optim.AdamW(parameters)

    def bare() -> None:
        for _ in range(MICRO_BATCHES):
            logits = model(torch.randn(rows, width, device=device))
            targets = torch.randint(CLASSES, (rows,), device=device)
            (F.cross_entropy(logits, targets) / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def audited() -> None:
        with accumext.audit(model, optimizer, windows=1):
            bare()

    def contender(run: Callable[[], None]) -> Contender:
        size = sum(p.nbytes for p in parameters)
        return Contender(run, UNKNOWN, None, lambda: peak_memory(run, device) / size)

    shape = Shape(sum(p.numel() for p in parameters), len(parameters))
    return Job(name, shape, {BARE: contender(bare), AUDITED: contender(audited)})


if __name__ == "__main__":
    main()
