"""Training a decoder on its own greedy tokens: accumext beside the usual ways, PyTorch and peers.

    python bench/decoder.py [--json FILE] [--device cpu|cuda] [--cell gru|lstm|rnn]
                            [--dtype float32|bfloat16] [--threads N] [--shape T,B,V,H]... [--full]
                            [--quick]

One run, everything side by side: _decoders.py says what each way does, _decoding.py how it is
measured. A time is that of a whole call, forward and backward; on a GPU from the first kernel to
the last, whatever they wait for, and the JSON has the host's own time beside it. "waits" counts how
often the host waits for the GPU in a call. "backward per token", with the state detached after
every step, is the usual answer to memory; its gradient is truncated, not exact. The limit is the
time of the three matrix products of the head alone. Peak memory is what a call holds at its highest
point, over what there was before, less the gradients that it leaves: what it takes besides
parameters and gradients. "gradient off" is the relative distance to plain autograd on the tokens
that the way itself fed, in float64 if that is small enough and in float32 elsewhere, over all
parameters, and "recurrent" over embedding and cell alone, where truncation shows; "not greedy"
counts the tokens fed that were not the argmax there.

Each shape has a process of its own: memory that the C library has kept of one shape spares the next
one its page faults, and plain autograd was up to three times faster then, or not, by chance. To
have it keep all:

    MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000 python bench/decoder.py

bfloat16: float32 parameters under torch.autocast, for every contender. On a CPU accumext under
autocast is also timed beside the float32 contenders. ATEN_CPU_CAPABILITY=avx2 in the environment is
a CPU without AVX-512, for all of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import _head_peers
import _results
import torch
from _decoder_report import Faster, Growth, Smaller, Waits, contender_rows, table
from _decoders import (
    CELLS,
    CHECKPOINT,
    OURS,
    OURS_BF16,
    PER_TOKEN,
    PLAIN,
    PRODUCTS,
    Decoder,
    Shape,
    ways,
)
from _decoding import Bench, Case, Paces, Patience, Result
from _facts import machine
from _head_peers import TORCH
from _report import figure_lines
from _timing import clock

# Roles, by which the figures know shapes.
SMALL, WIDE, MANY, LARGE = "small", "wide", "many rows", "large"
LONG, SHORTER, LONGER = "long", "shorter", "longer"

SHAPES = {
    "cpu": (
        Shape(32, 8, 10_000, 256),
        Shape(64, 8, 50_000, 256, SMALL),
        Shape(50, 16, 50_000, 512, WIDE),
        Shape(32, 32, 50_000, 512, MANY),
    ),
    "cuda": (Shape(200, 32, 50_257, 1024, LARGE),),
}
MEMORY_SHAPES = (
    Shape(200, 16, 50_000, 256, LONG),
    Shape(64, 16, 50_000, 256, SHORTER),
    Shape(256, 16, 50_000, 256, LONGER),
)
QUICK_SHAPES = {
    "cpu": (
        Shape(12, 4, 997, 32, SMALL),
        Shape(10, 4, 1009, 48, WIDE),
        Shape(9, 8, 1013, 32, MANY),
    ),
    "cuda": (Shape(12, 8, 1009, 64, LARGE),),
}
QUICK_MEMORY_SHAPES = (
    Shape(40, 4, 2003, 16, LONG),
    Shape(16, 4, 2003, 16, SHORTER),
    Shape(64, 4, 2003, 16, LONGER),
)
GRID = {  # steps, rows, vocabulary, embedding and state; on a GPU, large batches
    "cpu": [(32, 128, 512), (8, 16, 32, 64), (10_000, 50_000, 128_000), (256, 512, 1024)],
    "cuda": [(64,), (64, 128, 256, 512), (8_000, 32_000, 128_000), (512, 1024)],
}

# Ways that no figure is about are measured in the first shape, and if --shape asks for it: the
# large shapes take most of the time that a run has.
ASIDE = {
    SMALL: (TORCH, CHECKPOINT, OURS_BF16),
    WIDE: (TORCH, CHECKPOINT),
    MANY: (TORCH, CHECKPOINT, OURS_BF16),
}

DEFAULT = Patience(seconds=3.0, least=3, most=15, longest=30.0)
CHOSEN = Patience(seconds=5.0, least=3, most=15, longest=120.0)  # shapes that were asked for
QUICK = Patience(seconds=0.05, least=3, most=6, longest=60.0)

FASTER_BF16 = [Faster(WIDE, OURS_BF16, PRODUCTS, 1 / 0.40), Faster(WIDE, OURS_BF16, OURS, 2.0)]

FIGURES: dict[str, list[Faster | Smaller | Waits | Growth]] = {
    "cpu": [
        Faster(SMALL, OURS, PER_TOKEN, 8.0),
        Faster(SMALL, OURS, PLAIN, 10.0),
        Faster(WIDE, OURS, PER_TOKEN, 5.0),
        Faster(WIDE, OURS, PLAIN, 5.0),
        Faster(WIDE, OURS, PRODUCTS, 1 / 0.75),
        *(FASTER_BF16 if torch.cpu._is_avx512_bf16_supported() else []),
        Faster(MANY, OURS, PER_TOKEN, 4.0),
        Faster(MANY, OURS, PLAIN, 5.5),
        Smaller(LONG, 10.0),
        Growth(SHORTER, LONGER),
    ],
    "cuda": [
        Faster(LARGE, OURS, PLAIN, 8.0),
        Smaller(LARGE, 10.0),
        Waits(LARGE),
        Growth(SHORTER, LONGER),
    ],
}
PROMISED = {"cpu": ("gru", torch.float32), "cuda": ("gru", torch.bfloat16)}  # of the figures


def main() -> int:
    args = arguments()
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    facts = machine(device) | _head_peers.status()  # compiles what is to be compiled
    facts["bfloat16"] = "float32 parameters under torch.autocast"
    kept = (f"{name}={value}" for name, value in os.environ.items() if name.startswith("MALLOC_"))
    facts["allocator"] = " ".join(kept) or "as it comes"

    patience = DEFAULT
    if args.shape or args.full:
        patience = CHOSEN
    elif args.quick:
        patience = QUICK
    results: list[Result] = []
    failed: dict[str, str] = {}
    paces: Paces = {}
    for case in cases(args):
        try:
            threads = torch.get_num_threads()
            result, paces = _results.run_apart(measure, case, device, patience, paces, threads)
        except Exception as error:  # memory is short, or the process was killed
            failed[str(case)] = f"{type(error).__name__}: {error}"
            print(f"\n{case}: {error}", file=sys.stderr, flush=True)
        else:
            results.append(result)
            print(table(result), flush=True)
        promised = figures(args, device, results)
        rows = [row for result in results for row in contender_rows(result)]
        content = {"machine": facts, "rows": rows, "figures": promised, "failed": failed}
        _results.write(args.json, content)

    if promised:
        print(figure_lines(promised))
    print("", *(f"{name}: {fact}" for name, fact in facts.items()), sep="\n")
    return 1 if failed else 0


def figures(
    args: argparse.Namespace, device: torch.device, results: list[Result]
) -> list[dict[str, Any]]:
    """Return the figures that are promised, of those measured."""
    if (args.cell, args.dtype) != PROMISED[device.type]:
        return []
    return [row for figure in FIGURES[device.type] for row in figure.rows(results)]


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases to be measured, the smallest first."""
    chosen: list[Shape] = args.shape or []
    if args.full:
        grid = [Shape(t, b, v, h) for t, b, v, h in itertools.product(*GRID[args.device])]
        chosen = [*chosen, *sorted(grid, key=lambda shape: shape.logits * shape.size)]
    timed = chosen or (QUICK_SHAPES if args.quick else SHAPES)[args.device]
    for shape in timed:
        aside = () if chosen or args.quick else ASIDE.get(shape.role, ())
        yield Case(shape, args.cell, args.dtype, args.way, without=aside)
    if not chosen:
        for shape in QUICK_MEMORY_SHAPES if args.quick else MEMORY_SHAPES:
            names = args.way or ((PLAIN, OURS) if shape.role == LONG else (OURS,))
            yield Case(shape, args.cell, args.dtype, names, timed=False)


def measure(
    case: Case, device: torch.device, patience: Patience, paces: Paces, threads: int
) -> tuple[Result, Paces]:
    """Measure a case, in a process of its own."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    warm_up(device, case.cell, case.dtype)
    bench = Bench(device, clock(device, ahead=False), patience, paces)
    return bench.measure(case), bench.paces


def warm_up(device: torch.device, cell: str, dtype: torch.dtype) -> None:
    """Do all that a process does once, such as a library's workspace, so that no figure has it."""
    decoder = Decoder(Shape(2, 2, 10, 8), cell, device)
    for way in ways(device, dtype, 2).values():
        way(decoder)


def arguments() -> argparse.Namespace:
    parser = _results.parser(__doc__, "case")
    parser.add_argument("--cell", choices=list(CELLS), default="gru", help="%(default)s")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="float32 on a CPU and bfloat16 on a GPU, as in the figures",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of torch; as many as it chooses")
    parser.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="T,B,V,H",
        help="instead of the usual ones, for example 50,16,50000,512; may be given again",
    )
    parser.add_argument(
        "--way", action="append", metavar="NAME", help="as in the tables; may be given again"
    )
    parser.add_argument(
        "--full", action="store_true", help="all shapes of the device's grid: hours on a CPU"
    )
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype) if args.dtype else PROMISED[args.device][1]
    return args


def _shape(text: str) -> Shape:
    """Return the shape that the figures know, if they know it."""
    steps, batch, vocabulary, size = (int(number) for number in text.split(","))
    known = {shape[:4]: shape for shape in (*SHAPES["cpu"], *SHAPES["cuda"], *MEMORY_SHAPES)}
    shape = Shape(steps, batch, vocabulary, size)
    return known.get(shape[:4], shape)


if __name__ == "__main__":
    sys.exit(main())
