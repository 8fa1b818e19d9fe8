"""The trainings of a program inside of `accumext.audit`: what it says of them.

python _audit.py PROGRAM [--json FILE] [--only TEXT]
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from typing import Any

import _factors
from _factors import Rows, Run, Seen

import accumext

WINDOWS = 8
NOT_AUDITED = ("resumed", "cure")  # by how their names begin


def said(run: Run) -> dict[str, Any]:
    audit = accumext.audit(windows=WINDOWS)

    def watched(seen: Seen) -> None:
        with audit:
            run(seen)

    found: dict[str, Any] = {**_factors.attempt(watched, Seen())}
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


def main(package: str, rows: Rows) -> None:
    """Instead of the program's own."""
    audited = {
        row: {name: run for name, run in runs.items() if not name.startswith(NOT_AUDITED)}
        for row, runs in rows.items()
    }
    _factors.write({"accumext": accumext.__version__}, audited, said)


if __name__ == "__main__":
    _factors.main = main
    del sys.argv[0]  # the program's own name comes first
    runpy.run_path(sys.argv[0], run_name="__main__")
