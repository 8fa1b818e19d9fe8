"""Checks before the run of all that would otherwise fail only at its end."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch


def problem(args: argparse.Namespace) -> str | None:
    """Why these options cannot be followed, in one sentence or two; None if they can."""
    if args.device == "cuda" and not torch.cuda.is_available():
        return "demo: --device must be usable, got cuda without a GPU that torch can use"
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "demo: --plot must have matplotlib, got none. pip install matplotlib"
    for name in ("json", "plot"):
        path = getattr(args, name)
        error = None if path is None else _error_of_writing(path)
        if error is not None:
            reason = error.strerror or type(error).__name__
            return f"demo: --{name} must be a file that can be written, got {path} ({reason})"
    if args.json is not None and args.plot is not None and _same(args.json, args.plot):
        return f"demo: --plot must be another file than --json, got {args.plot}"
    return None


def _error_of_writing(path: Path) -> OSError | None:
    """The error of opening a file to write; what is in it stays, and a new one is removed again."""
    try:
        target = path.resolve()  # of a link, which is to stay
        new = not target.exists()
        with target.open("ab"):
            pass
        if new:
            target.unlink()
    except OSError as error:
        return error
    return None


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() and not one.is_char_device()  # /dev/null takes both
