"""Gradient operations and windows beside stock PyTorch, loops and peers, the memory as the limit.

    python bench/accumulate.py [--json FILE] [--device cpu|cuda] [--jobs norm clip] [--quick]

One run, everything side by side: _timing.py says how. Every contender names the bytes per element
that its passes move: r in passes that only read, u in passes that write too, c in passes that read
one memory and write another. The results of the contenders of a job are compared before they are
timed; only those with "alone", "plain" or "unchecked" in their names do less than the others.

Windows, from the first forward pass to the step, have models of their own, and another table: the
time over that of a loop by hand, and the peak of the memory that is taken besides parameters and
optimizer state, activations included, in sets of gradients. Steps: 100 of a window of one, back to
back on the wall, beside a loop by hand at its best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import _peers
import _results
import torch
from _boundary_jobs import KINDS, REGIMES, boundary_jobs
from _facts import machine, promises
from _gradient_jobs import (
    accumulate_jobs,
    clip_jobs,
    norm_jobs,
    round_jobs,
    scale_jobs,
    unscale_jobs,
)
from _limits import Memory
from _report import COPY, LIMIT, MICROSECONDS, Figure, evaluate, figure_lines, table, write_json
from _timing import Job, Patience, Shape, clock, measure
from _window_jobs import QUICK_SHAPES as QUICK_WINDOW_SHAPES
from _window_jobs import SHAPES as WINDOW_SHAPES
from _window_jobs import STEP_SHAPES, step_jobs, window_jobs

# By which the figures know shapes.
HUGE, LARGE, MEDIUM, MANY, TINY = "huge", "large", "medium", "many", "tiny"
SHAPES = (
    Shape(10**8, 200, LARGE),
    Shape(10**7, 50),
    Shape(10**6, 1),
    Shape(2 * 10**6, 2000, MANY),
    Shape(10**4, 10, TINY),
)
GPU_SHAPES = (  # the figures' first, should time run out
    Shape(5 * 10**7, 100, MEDIUM),
    Shape(2 * 10**6, 2000, MANY),
    Shape(10**8, 200, LARGE),
    Shape(10**4, 10, TINY),
    Shape(4 * 10**8, 300, HUGE),
    Shape(10**7, 50),
    Shape(10**6, 1),
)
QUICK_SHAPES = (Shape(10**7, 20, LARGE), Shape(50_000, 50, MANY), Shape(10**4, 10, TINY))
QUICK = Patience(seconds=0.0, least=3)
# A GPU's times are steady, and 120 jobs are to be done in two minutes.
PATIENCE = {"cpu": Patience(), "cuda": Patience(seconds=0.2)}
WINDOW_PATIENCE = {"cpu": Patience(least=5), "cuda": Patience(0.2, least=5)}  # some take seconds
COLD = 10**7  # elements; of fewer, a CPU may have all in its cache, and the memory is no limit

OURS, WRITTEN, FOLDED = "accumext", "accumext, materialised", "accumext, folded"
FOREACH, STOCK = "torch foreach", "torch: cast, unscale, add, norm"
UNSCALE = "unscale, check, norm, clip"
IDLE, CLIPPING = "clip_grad_norm_, nothing to clip", "clip_grad_norm_, clipping"
OVERWRITING = "accumulate_ overwrite bf16"
ROUNDED, STOCHASTIC = "copy_rounded_ bf16", "accumext, stochastic"
HALVES = ("accumulate_ bf16", "accumulate_ fp16")
BOUNDARIES = tuple(f"boundary, {kind}: {regime}" for kind in KINDS for regime in REGIMES)

JOBS: dict[str, Callable[..., Iterator[Job]]] = {
    "norm": norm_jobs,
    "unscale": unscale_jobs,
    "boundary": boundary_jobs,
    "clip": clip_jobs,
    "accumulate": accumulate_jobs,
    "scale": scale_jobs,
    "round": round_jobs,
    "window": window_jobs,
    "steps": step_jobs,
}


def figures(device: torch.device) -> list[Figure]:
    """Return the figures that are promised, and, without a target, those beside them."""
    if device.type == "cuda":
        at_limit = ("total_norm fp32", OURS), (UNSCALE, WRITTEN), *((job, OURS) for job in HALVES)
        return [
            *(
                Figure(job, role, contender, COPY, 0.9)
                for role in (MEDIUM, LARGE, HUGE)
                for job, contender in at_limit
            ),
            *(Figure(job, MANY, contender, MICROSECONDS, 15.0) for job, contender in at_limit),
            Figure(UNSCALE, LARGE, FOLDED, FOREACH, 3.0),
            Figure(UNSCALE, LARGE, WRITTEN, FOREACH, None),
            *(Figure(job, LARGE, OURS, "torch", None) for job in BOUNDARIES),
            Figure("total_norm fp32", MANY, OURS, FOREACH, None),
            *(Figure(job, TINY, OURS, "torch", 1.0) for job in BOUNDARIES),
            *(Figure(ROUNDED, LARGE, contender, LIMIT, None) for contender in (OURS, STOCHASTIC)),
        ]
    return [
        Figure("total_norm fp32", LARGE, OURS, LIMIT, 0.9),
        Figure(UNSCALE, LARGE, WRITTEN, FOREACH, 1.6),
        Figure(UNSCALE, LARGE, FOLDED, FOREACH, 3.5),
        *(Figure(job, LARGE, OURS, "torch", None) for job in BOUNDARIES),
        Figure(IDLE, LARGE, OURS, FOREACH, 2.2),
        Figure(CLIPPING, LARGE, OURS, FOREACH, 1.0),
        *(Figure(job, LARGE, OURS, "torch add_ alone", 0.85) for job in HALVES),
        *(Figure(job, LARGE, OURS, STOCK, 3.0) for job in HALVES),
        *(Figure(job, LARGE, OURS, LIMIT, 0.85) for job in (*HALVES, OVERWRITING, ROUNDED)),
        Figure(ROUNDED, LARGE, STOCHASTIC, LIMIT, 0.85),
        Figure("total_norm fp32", MANY, OURS, FOREACH, 5.0),
        Figure(UNSCALE, MANY, WRITTEN, FOREACH, 5.0),
        Figure(UNSCALE, MANY, FOLDED, FOREACH, 5.0),
        Figure(IDLE, MANY, OURS, FOREACH, 5.0),
        Figure(CLIPPING, MANY, OURS, FOREACH, 5.0),
        *(Figure(job, MANY, OURS, STOCK, 5.0) for job in HALVES),
        *(Figure(job, MANY, OURS, "torch", None) for job in BOUNDARIES),
        *(Figure(job, TINY, OURS, "torch", 1.0) for job in BOUNDARIES),
    ]


def jobs(args: argparse.Namespace, device: torch.device) -> Iterator[Job]:
    """Yield the jobs called for; a tiny model is about the boundary alone."""
    for shape in args.shape or default_shapes(device, args.quick):
        for name in args.jobs:
            if name not in ("window", "steps") and (shape.role != TINY or name == "boundary"):
                yield from JOBS[name](shape, device)
    if "window" in args.jobs:
        for shape in args.shape or (QUICK_WINDOW_SHAPES if args.quick else WINDOW_SHAPES):
            yield from window_jobs(shape, device, args.quick)
    if "steps" in args.jobs:
        for shape in args.shape or STEP_SHAPES[device.type][: 1 if args.quick else None]:
            yield from step_jobs(shape, device)


def main() -> int:
    args = arguments()
    device = torch.device(args.device)
    torch.manual_seed(0)
    facts = machine(device) | _peers.status()  # compiles what is to be compiled
    patience = QUICK if args.quick else PATIENCE[device.type]
    window_patience = QUICK if args.quick else WINDOW_PATIENCE[device.type]
    seconds_of, seconds_of_window = clock(device), clock(device, ahead=False)
    print("B/element: r in passes that only read, u in passes that write too, c in copies")

    memory = Memory(device)
    results = [measure(job, seconds_of, patience) for job in memory.jobs()]
    yardstick = memory.yardstick(*results)
    facts["limit"] = f"{yardstick.reader} and {yardstick.updater}, in every repetition"
    if yardstick.write is not None:
        facts["limit"] += f"; of copies also {yardstick.writer}"
    print(*map(table, results), sep="\n", flush=True)
    failed: dict[str, str] = {}
    for job in jobs(args, device):
        cold = device.type == "cuda" or job.shape.elements >= COLD
        try:
            if job.again:
                results.append(measure(job, seconds_of_window, window_patience))
            else:
                results.append(measure(job, seconds_of, patience, yardstick if cold else None))
        except Exception as error:  # contenders differ, memory is short: the other jobs go on
            failed[f"{job.name}, {job.shape}"] = f"{type(error).__name__}: {error}"
            print(f"\n{job.name}: {job.shape}: {error}", file=sys.stderr, flush=True)
        else:
            print(table(results[-1]), flush=True)
        del job  # and its tensors, before those of the next are made
        write_json(args.json, facts, results, evaluate(figures(device), results), failed)

    rows = evaluate(figures(device), results) + promises(device)
    print(figure_lines(rows))
    print("", *(f"{name}: {fact}" for name, fact in facts.items()), sep="\n")
    write_json(args.json, facts, results, rows, failed)
    return 1 if failed else 0


def default_shapes(device: torch.device, quick: bool) -> Sequence[Shape]:
    if quick:
        return QUICK_SHAPES
    return GPU_SHAPES if device.type == "cuda" else SHAPES


def arguments() -> argparse.Namespace:
    parser = _results.parser(__doc__, "job")
    parser.add_argument(
        "--jobs",
        nargs="+",
        choices=list(JOBS),
        default=list(JOBS),
        help="all, unless some are named",
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="ELEMENTS/TENSORS",
        help="instead of the usual ones, for example 4e8/300; may be given again",
    )
    return parser.parse_args()


def _shape(text: str) -> Shape:
    """Return the shape that the figures know, if they know it."""
    elements, tensors = (int(float(number)) for number in text.split("/"))
    roles = {shape[:2]: shape for shape in GPU_SHAPES}
    return roles.get((elements, tensors), Shape(elements, tensors))


if __name__ == "__main__":
    sys.exit(main())
