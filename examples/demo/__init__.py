"""`python -m accumext demo`: a decoder learns docstrings by heart, beside plain PyTorch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import accumext

from .reciter import TRAINING_SECONDS, Reciter, train
from .report import Record, filled, summary, write_plot
from .text import OPENING, Refused, load_text
from .ways import TOTAL_SECONDS, compare

REFUSED = 2  # exit code for options that cannot be used, as argparse's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demo."""
    parser.epilog = "Ctrl-C ends the run; what was found until then is printed and written."
    parser.add_argument(
        "--steps",
        type=_positive,
        help=f"optimizer steps (as many as {TRAINING_SECONDS:.0f} seconds allow)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (%(default)s)")
    parser.add_argument(
        "--feedback",
        choices=("scheduled", "greedy", "teacher"),
        default="scheduled",
        help="while it learns, feed the decoder its own words at times, always, or never "
        "(%(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    for name, default, meaning in (
        ("batch", 16, "docstrings to learn"),
        ("length", 96, "words of each to recite"),
        ("hidden", 128, "size of states"),
        ("vocab", 50_000, "words known"),
    ):
        parser.add_argument(
            f"--{name}", type=_positive, default=default, help=f"{meaning} (%(default)s)"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write a PNG of what was learned and of memory here; measures memory at several "
        "lengths",
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; return the exit code. KeyboardInterrupt is raised after the report."""
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if accumext.backend() == "reference":  # compiles kernels if need be, before the clock runs
        print(filled(accumext.backend_reason()), flush=True)
    record = Record(args, {"python": platform.python_version(), "torch": torch.__version__})
    try:
        _check(args)
        _run(args, record)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        record.interrupted = True
    record.seconds = record.elapsed()
    print(summary(record))
    if args.json is not None:
        known = asdict(record) | {"settings": {n: v for n, v in vars(args).items() if n != "run"}}
        args.json.write_text(json.dumps(known, indent=2, default=str) + "\n", encoding="utf-8")
    if args.plot is not None:
        write_plot(record, args.plot)
    if record.interrupted:
        raise KeyboardInterrupt
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options at once that would otherwise fail at the end of the run."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise Refused("demo: --device must be usable, got cuda without a GPU that torch can use")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise Refused("demo: --plot must have matplotlib, got none. pip install matplotlib")
    if args.json is not None and args.json == args.plot:
        raise Refused(f"demo: --plot must be another file than --json, got {args.plot}")
    for name in ("json", "plot"):
        path = getattr(args, name)
        try:
            if path is not None:
                path.open("ab").close()  # its old contents stay until the end
        except OSError as error:
            raise Refused(
                f"demo: --{name} must be a file that can be written, got {path} ({error.strerror})"
            ) from None


def _run(args: argparse.Namespace, record: Record) -> None:
    if args.steps is None:
        about = (
            f"This takes about {TOTAL_SECONDS / 60:.0f} minutes: {TRAINING_SECONDS:.0f} s of "
            "learning, however many steps that is, then a comparison with plain PyTorch."
        )
        print(filled(about), flush=True)
    text = load_text(args.vocab, args.length, 2 * args.batch, args.seed)
    about = (
        f"A GRU learns {args.batch} docstrings of Python {record.versions['python']}'s standard "
        f"library by heart: it reads the first {OPENING} words and says the next {args.length}, "
        f"one of {args.vocab:,} words each time. These docstrings use {text.used:,}; the others "
        f"are {'the most frequent' if len(text.words) == args.vocab else 'all'} words of the "
        f"library's source, {len(text.words):,} in all."
    )
    print(filled(about), flush=True)
    torch.manual_seed(args.seed)
    model = Reciter(args.vocab, args.hidden).to(args.device)
    train(model, text, args, record)
    compare(model, text.docstrings[:, args.batch :].to(args.device), args, record)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
