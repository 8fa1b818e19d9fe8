"""The programs of examples/programs, each run several times: seconds and peak memory of both ways.

python bench/programs.py --json bench/results/programs_cpu.json
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _results
import torch
from _facts import machine

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "programs"
# A title, if a program compares several things, and the two lines below it.
COMPARISON = re.compile(
    r"(?:^feedback: (?P<title>\w+)\n)?"
    r"^plain PyTorch +(?P<plain_s>\S+) s +(?P<plain_mb>\S+) MB\n"
    r"^accumext +(?P<s>\S+) s +(?P<mb>\S+) MB",
    re.MULTILINE,
)


def comparisons(printed: str) -> dict[str, dict[str, float]]:
    """Return a program's printed results by title: seconds, and the peaks with gradients in
    them."""
    return {
        found["title"] or "": {
            "plain PyTorch, s": float(found["plain_s"]),
            "plain PyTorch, MB": float(found["plain_mb"]),
            "accumext, s": float(found["s"]),
            "accumext, MB": float(found["mb"]),
        }
        for found in COMPARISON.finditer(printed)
    }


def summary(runs: Sequence[dict[str, dict[str, float]]], title: str) -> dict[str, Any]:
    """Return the medians of the runs, and the range of their ratios."""
    columns = {key: [run[title][key] for run in runs] for key in runs[0][title]}
    times = [a / b for a, b in zip(columns["plain PyTorch, s"], columns["accumext, s"])]
    medians = {key: statistics.median(values) for key, values in columns.items()}
    return medians | {"runs": len(runs), "times as fast": [min(times), max(times)]}


def main() -> None:
    parser = _results.parser(__doc__, "program", device=False)
    parser.add_argument("--runs", type=int, default=3, help="of each program (default: 3)")
    args = parser.parse_args()
    programs: list[dict[str, Any]] = []
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem == "comparison":
            continue
        command = [sys.executable, str(path), *(["--quick"] if args.quick else [])]
        runs = []
        for _ in range(args.runs):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(comparisons(done.stdout))
            if not runs[-1]:
                sys.exit(f"{path.name} has printed no comparison:\n{done.stdout}")
        for title in runs[0]:
            programs.append({"program": path.stem, "title": title, **summary(runs, title)})
            print(programs[-1], flush=True)
        _results.write(args.json, {"machine": machine(torch.device("cpu")), "programs": programs})


if __name__ == "__main__":
    main()
