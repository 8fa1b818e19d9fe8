"""Files of results: medians, quartiles and facts, laid out with a row of a table on each line."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

SHORT, LONGEST_ROW = 160, 1000


def command() -> str:
    """Return the command line of this process, with the options that its results depend on."""
    return shlex.join(["python", *sys.argv])


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Replaces the file as a whole: who is cut off leaves what was there before."""
    if path is None:
        return
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(as_text(content), encoding="utf-8")
    beside.replace(path)


def as_text(content: Any) -> str:
    """JSON in which a row, or whatever is short, has one line, and closing brackets have none."""
    return _laid_out(content, "\n ") + "\n"


def _laid_out(value: Any, break_: str) -> str:
    line = json.dumps(value, allow_nan=False)
    if len(line) <= (LONGEST_ROW if _is_row(value) else SHORT):
        return line
    if isinstance(value, list):
        return f"[{break_}" + f",{break_}".join(_laid_out(v, break_ + " ") for v in value) + "]"
    cells = (f"{json.dumps(key)}: {_laid_out(v, break_ + ' ')}" for key, v in value.items())
    return f"{{{break_}" + f",{break_}".join(cells) + "}"


def _is_row(value: Any) -> bool:
    """Tell whether it is a scalar, or holds scalars and, under keys, lists of scalars."""

    def plain(values: Any) -> bool:
        return not any(isinstance(v, (dict, list)) for v in values)

    if isinstance(value, dict):
        return plain(v for v in value.values() if not isinstance(v, list) or not plain(v))
    return not isinstance(value, list) or plain(value)
