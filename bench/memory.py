"""Peak memory of a decoder fed its own argmax, against the number of steps T.

    python bench/memory.py [--json FILE] [--plot STEM] [--device cpu|cuda] [--quick]
    python bench/memory.py --from FILE --plot STEM

Three of the ways in _decoders.py: plain PyTorch with one graph of all steps; a backward pass per
token with a detached state, whose gradient is truncated; and `accumext.decode_loss`. Peak memory is
that of bench/decoder.py: what a call, forward and backward, holds at its highest point, over what
there was before, less the gradients that it leaves. So it is what training takes besides parameters
and gradients. It is counted from the allocations of tensors, so another run on a busier machine has
the same.

Plain PyTorch needs 3 GiB for the longest run on a CPU, 1,000 steps, and is left out if that does
not fit. Each T has a process of its own, and the JSON is written after each. At two of them only
`decode_loss` is measured.

--plot STEM draws STEM_light.svg and STEM_dark.svg, for white and for dark pages. The pictures of
the documentation are

    python bench/memory.py --json bench/results/memory_cpu.json --plot docs/memory
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import _results
import torch
from _decoder_report import MIB, contender_rows
from _decoders import OURS, PER_TOKEN, PLAIN, Shape
from _decoding import Case, Result
from _facts import machine
from decoder import DEFAULT, measure

WAYS = PLAIN, PER_TOKEN, OURS
STEPS = 8, 16, 32, 64, 125, 250, 500, 1000
OURS_STEPS = 750, 875  # where decode_loss needs the most; the other two grow in a straight line
QUICK_STEPS = 16, 32, 64


def main() -> int:
    args = arguments()
    content = json.loads(args.source.read_text(encoding="utf-8")) if args.source else run(args)
    if args.plot is not None:
        from _memory_plot import plot  # matplotlib is not needed otherwise

        plot(args.plot, content["rows"])
    return 1 if content["failed"] else 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and return the content of --json."""
    device = torch.device(args.device)
    content: dict[str, Any] = {"machine": machine(device), "rows": [], "failed": {}}
    print(f"peak MiB over parameters and gradients\n{'':32}", *(f"{name:>30}" for name in WAYS))
    for case in cases(args.quick):
        try:
            threads = torch.get_num_threads()
            result, _ = _results.run_apart(measure, case, device, DEFAULT, {}, threads)
        except Exception as error:  # memory is short, or the process was killed
            content["failed"][str(case)] = f"{type(error).__name__}: {error}"
            print(f"{case}: {error}", file=sys.stderr, flush=True)
        else:
            content["rows"] += contender_rows(result)
            print(line(result), flush=True)
        _results.write(args.json, content)
    print("", *(f"{name}: {fact}" for name, fact in content["machine"].items()), sep="\n")
    return content


def cases(quick: bool) -> list[Case]:
    batch, vocabulary, size = (16, 2003, 16) if quick else (16, 50_000, 256)
    ways = dict.fromkeys(QUICK_STEPS if quick else STEPS, WAYS)
    if not quick:
        ways |= dict.fromkeys(OURS_STEPS, (OURS,))
    return [
        Case(Shape(steps, batch, vocabulary, size), "gru", torch.float32, ways[steps], timed=False)
        for steps in sorted(ways)
    ]


def line(result: Result) -> str:
    """Return a line with the peaks of one T."""
    found, left_out = result.checked, result.left_out
    peaks = (
        f"{found[name].peak_bytes / MIB:.2f}" if name in found else left_out.get(name, "")
        for name in WAYS
    )
    return " ".join([f"{result.case.shape!s:32}", *(f"{peak:>30}" for peak in peaks)])


def arguments() -> argparse.Namespace:
    parser = _results.parser(__doc__, "T")
    parser.add_argument("--plot", type=Path, metavar="STEM", help="draw STEM_{light,dark}.svg")
    parser.add_argument(
        "--from",
        type=Path,
        metavar="FILE",
        dest="source",
        help="draw what --json wrote into this file, and measure nothing",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
