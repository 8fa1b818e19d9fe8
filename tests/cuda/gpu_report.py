"""The report of gpu.sh: what became of each part so far, as JSON and, on request, as a table.

    python tests/cuda/gpu_report.py PARTS FILE MACHINE BACKEND SECONDS [--print]

PARTS has a line per part: name, result, seconds and reason, separated by tabs. FILE is replaced as
a whole, so that it is complete whenever the run is cut off.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    source, target, machine, backend, seconds = sys.argv[1:6]
    with open(source, encoding="utf-8", errors="replace") as lines:
        rows = [line.rstrip("\n").split("\t", 3) for line in lines]
    parts = [{"name": n, "result": r, "seconds": int(s), "reason": why} for n, r, s, why in rows]
    report = {"machine": machine, "backend": backend, "seconds": int(seconds), "parts": parts}
    with open(f"{target}.part", "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
    os.replace(f"{target}.part", target)
    if "--print" in sys.argv:
        print(f"=== {machine}: {seconds} s, written to {target}")
        for name, result, taken, reason in rows:
            print(f"{name:<10} {result:<8} {taken:>4} s  {reason}".rstrip())


if __name__ == "__main__":
    main()
