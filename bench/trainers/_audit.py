"""The trainings of a program inside of `accumext.audit`: what it says of them.

python _audit.py PROGRAM [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from _factors import Run, Seen

import accumext

WINDOWS = 8
NOT_AUDITED = ("resumed", "cure")  # by how their names begin


def said(run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    audit = accumext.audit(windows=WINDOWS)
    seen, found = Seen(), dict[str, Any]()
    with contextlib.redirect_stdout(sys.stderr):
        try:
            with audit, seen:
                run(seen)
        except Exception as error:
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"[:300]
    for kind in ("findings", "questions"):
        try:
            entries = getattr(audit, kind, ())
            found[kind] = [getattr(entry, "id", None) or entry.name for entry in entries]
        except Exception as error:
            found[kind] = [f"{type(error).__name__}: {error}"[:300]]
    with contextlib.suppress(Exception):
        found["windows"] = len(audit.to_json()["windows"])
    text = str(audit)
    print(text, file=sys.stderr)
    return found | {"report": text.splitlines()[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    caught: list[Any] = []
    import _factors

    _factors.main = lambda package, rows: caught.append(rows)  # what the program would run
    runpy.run_path(args.program, run_name="__main__")
    rows = {
        row: {
            name: said(run)
            for name, run in runs.items()
            if not name.startswith(NOT_AUDITED) and args.only in f"{row}: {name}"
        }
        for row, runs in caught[0].items()
    }
    text = json.dumps({"versions": {"accumext": accumext.__version__}, "rows": rows}, indent=1)
    print(text) if args.json is None else args.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
