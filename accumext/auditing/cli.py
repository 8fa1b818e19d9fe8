"""`python -m accumext audit train.py [arguments]`: the audit of a script's first windows."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from accumext.auditing._audit import Audit, ids_of, verdict
from accumext.auditing._lines import is_own
from accumext.auditing._observe import Observer
from accumext.auditing._steps import Done

_CURES = {  # of errors of torch that end a script, by words of theirs
    "Trying to backward through the graph a second time": "time steps tied by a state need one "
    "pass for all of them, accumext.decode_loss, or a detached state, accumext.tbptt(k1=1); a "
    "batch that goes on from the one before begins with its state.detach(), as out.state.detach() "
    "of decode_loss; slices of a head, which share their features, need accumext.chunked_loss, "
    "whose head_loss returns the loss and does not call backward",
    "modified by an inplace operation": "a step of the optimizer, or a write into a state, came "
    "between forward and backward; step after the last backward pass, and make new tensors by "
    "torch.where",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=int, default=4, help="steps to observe (default: 4)")
    parser.add_argument(
        "--optimizer", type=int, metavar="N", help="only the N-th that steps (default: all)"
    )
    parser.add_argument(
        "--ignore", type=_ids, action="extend", default=[], metavar="ID|FILE",
        help="accept findings, by id",
    )  # fmt: skip
    parser.add_argument("--twice", action="store_true", help="run it again, and compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write findings and windows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the windows' time line")
    parser.add_argument("script", type=Path, help="a training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def main(args: argparse.Namespace) -> int:
    """Run the script until its windows are complete; return 1 if there is a finding."""
    for words in _refused(args):
        print(f"accumext audit: {words}", file=sys.stderr)
        return 2
    with torch.random.fork_rng(range(torch.cuda.device_count()), enabled=args.twice):
        seen = _run(args, None)
    if args.twice:
        seen = _run(args, seen)
    right, words = verdict(seen, args.ignore)
    print(words, file=None if seen.judgement.seen else sys.stderr)
    if not seen.judgement.seen:
        return 2
    if args.json is not None:
        args.json.write_text(json.dumps(seen.to_json(), indent=2) + "\n")
    if args.plot is not None:
        seen.plot(args.plot)
    return 0 if right else 1


def _refused(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the arguments, before the script runs, which may take long."""
    if not args.script.is_file():
        yield f"no such file: {args.script}"
    for name, number in (("windows", args.windows), ("optimizer", args.optimizer)):
        if number is not None and number < 1:
            yield f"--{name} must be at least 1, got {number}"
    for path in (args.json, args.plot):
        if path is not None and not path.parent.is_dir():
            yield f"no such folder: {path.parent}"
    if args.plot is not None and find_spec("matplotlib") is None:
        yield "--plot needs matplotlib: pip install 'accumext[demo]'"


def _ids(ignore: str) -> Iterable[str]:
    try:
        return ids_of(Path(ignore) if Path(ignore).is_file() else [ignore])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no id, and no file of ids: {ignore}") from error


def _run(args: argparse.Namespace, against: Audit | None) -> Audit:
    """Audit the script, which sees the same modules, path and arguments as if Python ran it."""
    # torch imports more with the first optimizer, and then looks at all modules, lazy ones too.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    script = args.script.resolve()
    argv, path, modules = sys.argv, sys.path.copy(), sys.modules.copy()
    sys.argv = [str(args.script), *args.arguments]
    sys.path.insert(0, str(script.parent))
    program = sys.modules["__main__"] = ModuleType("__main__")
    program.__file__ = str(script)
    before = None if against is None else against.record
    number = None if args.optimizer is None else args.optimizer - 1
    seen = Audit(Observer(None, None, args.windows, True, number), before)
    try:
        with suppress(Done), seen:
            try:
                exec(compile(script.read_bytes(), script, "exec", dont_inherit=True), vars(program))
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
    except BaseException as error:
        with suppress(RuntimeError):  # the audit could not be closed
            if seen.judgement.seen:
                print(seen)
        for words, cure in _CURES.items():
            if words in str(error):
                lines = f"{words}: {cure}. See docs/troubleshooting.md, under these words"
                print("\naccumext audit: the script ends with an error whose cure is known")
                print(
                    *textwrap.wrap(lines, 98, initial_indent="   ", subsequent_indent="   "),
                    sep="\n",
                )
        raise
    finally:
        sys.argv, sys.path[:] = argv, path
        sys.modules["__main__"] = modules["__main__"]
        for name in sys.modules.keys() - modules:  # a second run imports the script's own anew
            file = vars(sys.modules[name]).get("__file__")  # a lazy module may raise if it is asked
            if file is not None and is_own(file):
                del sys.modules[name]
    return seen
