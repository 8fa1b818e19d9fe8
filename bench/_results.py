"""What benchmarks share: options, processes, and files with a row of a table on each line."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")

SHORT, LONGEST_ROW = 160, 1000


def parser(doc: str | None, each: str, *, device: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; --json is written after `each`."""
    result = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    result.add_argument(
        "--json", type=Path, metavar="FILE", help=f"where results go, after every {each}"
    )
    result.add_argument("--quick", action="store_true", help="tiny sizes: to see that it runs")
    if device:
        import torch  # not everybody has it

        found = "cuda" if torch.cuda.is_available() else "cpu"
        choices = ("cpu", "cuda")
        result.add_argument("--device", choices=choices, default=found, help="%(default)s")
    return result


def run_apart(function: Callable[..., R], *args: Any) -> R:
    """Return what a function returns in a process of its own, whose memory no other has used."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(function, *args).result()


def known(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without what is None."""
    return {key: value for key, value in row.items() if value is not None}


def command() -> str:
    """Return the command line of this process, with the options that its results depend on."""
    return shlex.join(["python", *sys.argv])


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Replace the file as a whole: who is cut off leaves what was there before."""
    if path is None:
        return
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(as_text(content), encoding="utf-8")
    beside.replace(path)


def as_text(content: Any) -> str:
    """Return JSON in which a row, or whatever is short, has one line, and closing brackets none."""
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
