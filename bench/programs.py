"""The programs of examples/programs, each run several times: seconds and peak memory of both ways.

python bench/programs.py --json bench/results/programs_cpu.json
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _facts import machine
from _results import write

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "programs"
# A title, where a program compares several things, and the two lines below it.
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
    """The medians of the runs, and the range of their ratios."""
    columns = {key: [run[title][key] for run in runs] for key in runs[0][title]}
    times = [a / b for a, b in zip(columns["plain PyTorch, s"], columns["accumext, s"])]
    medians = {key: statistics.median(values) for key, values in columns.items()}
    return medians | {"runs": len(runs), "times as fast": [min(times), max(times)]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")
    parser.add_argument("--runs", type=int, default=3, help="of each program (default: 3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that it runs")
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
    write(args.json, {"machine": machine(torch.device("cpu")), "programs": programs})


if __name__ == "__main__":
    main()
