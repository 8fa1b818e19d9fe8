"""The demo's command line."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import torch

import accumext
from accumext.demo.compare import TOTAL_SECONDS, compare
from accumext.demo.report import Record, Settings, summary, write_json, write_plot
from accumext.demo.text import OPENING, Refused, load_text
from accumext.demo.train import TRAINING_SECONDS, Reciter, train

REFUSED = 2  # exit code of options that cannot be followed, as argparse has it


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
    parser.add_argument(
        "--batch", type=_positive, default=16, help="docstrings to learn (%(default)s)"
    )
    parser.add_argument(
        "--length", type=_positive, default=96, help="words of each to recite (%(default)s)"
    )
    parser.add_argument(
        "--hidden", type=_positive, default=128, help="size of states (%(default)s)"
    )
    parser.add_argument("--vocab", type=_positive, default=50_000, help="words known (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write a PNG of what was learned and of memory here; measures memory at several "
        "lengths",
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code. KeyboardInterrupt comes after the report."""
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if accumext.backend() == "reference":  # compiles kernels if need be, before the clock runs
        _print(accumext.backend_reason())
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    record = Record(settings, {"python": platform.python_version(), "torch": torch.__version__})
    try:
        _check(args)
        _run(settings, record, curve=args.plot is not None)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        record.interrupted = True
    record.seconds = record.elapsed()
    print(summary(record, shutil.get_terminal_size().columns))
    if args.json is not None:
        write_json(record, args.json)
    if args.plot is not None:
        write_plot(record, args.plot)
    if record.interrupted:
        raise KeyboardInterrupt
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse at once what would otherwise fail at the end of the run."""
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
                path.open("ab").close()  # what is in it stays until the end
        except OSError as error:
            raise Refused(
                f"demo: --{name} must be a file that can be written, got {path} ({error.strerror})"
            ) from None


def _run(settings: Settings, record: Record, curve: bool) -> None:
    length, batch = settings.length, settings.batch
    if settings.steps is None:
        _print(
            f"This takes about {TOTAL_SECONDS / 60:.0f} minutes: {TRAINING_SECONDS:.0f} s of "
            "learning, however many steps that is, then a comparison with plain PyTorch."
        )
    text = load_text(settings.vocab, length, 2 * batch, settings.seed)
    _print(
        f"A GRU learns {batch} docstrings of Python {record.versions['python']}'s standard library "
        f"by heart: it reads the first {OPENING} words and says the next {length}, one of "
        f"{settings.vocab:,} words each time. These docstrings use {text.used:,}; the others are "
        f"{'the most frequent' if len(text.words) == settings.vocab else 'all'} words of the "
        f"library's source, {len(text.words):,} in all."
    )
    torch.manual_seed(settings.seed)
    model = Reciter(settings.vocab, settings.hidden).to(settings.device)
    train(model, text, settings, record)
    unseen = text.docstrings[:, batch:].to(settings.device)
    compare(model, unseen, settings, record, curve)


def _print(text: str) -> None:
    print(textwrap.fill(text, shutil.get_terminal_size().columns), flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
