"""The demo's command line."""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import textwrap
import time
from dataclasses import fields
from pathlib import Path

import torch

from accumext.demo.compare import compare
from accumext.demo.model import WordModel
from accumext.demo.outputs import problem
from accumext.demo.plot import write_plot
from accumext.demo.record import Continuation, Record, Settings, TextFacts
from accumext.demo.report import summary, write_json
from accumext.demo.text import END_NUMBER, UNKNOWN_NUMBER, Text, load_text
from accumext.demo.train import CONTEXT, evaluate, train, training_batches

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
REFUSED = 2  # exit code of options that cannot be followed, as argparse has it

_FEW_STEPS = 10  # below, one batch is compared and fewer words are evaluated
_CONTINUATIONS, _BEGINNING, _CONTINUED = 4, 10, 32  # how many, words given, words at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demo."""
    parser.epilog = (
        "Ctrl-C ends the run; what was found until then is printed and written, "
        f"and the exit code is {INTERRUPTED}."
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=40,
        help="optimizer steps of 2 batches each (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (%(default)s)")
    parser.add_argument(
        "--feedback",
        choices=("scheduled", "greedy", "teacher"),
        default="scheduled",
        help="feed the decoder its own argmax for a growing share of words, always, or never "
        "(%(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--batch", type=_positive, default=16, help="rows of a batch (%(default)s)")
    parser.add_argument("--length", type=_positive, default=96, help="words per row (%(default)s)")
    parser.add_argument(
        "--hidden", type=_positive, default=128, help="size of states (%(default)s)"
    )
    parser.add_argument(
        "--vocab", type=_vocabulary, default=50_000, help="words known (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write a PNG of loss and memory here; measures memory at several lengths",
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code."""
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    refusal = problem(args)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return REFUSED
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    record = Record(settings, {"python": platform.python_version(), "torch": torch.__version__})
    begin = time.perf_counter()
    try:
        text = load_text(settings.vocab)
        refusal = _too_long(settings, text)
        if refusal is not None:
            print(refusal, file=sys.stderr)
            return REFUSED
        _run(text, settings, record, curve=args.plot is not None)
    except KeyboardInterrupt:
        record.interrupted = True
    record.seconds = time.perf_counter() - begin
    print(summary(record, shutil.get_terminal_size().columns))
    if args.json is not None:
        write_json(record, args.json)
    if args.plot is not None:
        write_plot(record, args.plot)
    return INTERRUPTED if record.interrupted else 0


def _too_long(settings: Settings, text: Text) -> str | None:
    """Why there are no rows of this length, in one sentence; None if there are."""
    longest = min(len(text.training), len(text.held_out)) - CONTEXT
    if settings.length <= longest:
        return None
    return f"demo: --length must be at most {longest:,}, as the text has it, got {settings.length}"


def _run(text: Text, settings: Settings, record: Record, curve: bool) -> None:
    few = settings.steps < _FEW_STEPS
    record.text = TextFacts(len(text.training), len(text.held_out), len(text.words), text.entropy)
    _print(
        f"text: docstrings and comments of Python {record.versions['python']}'s standard library, "
        f"{len(text.training):,} words to train on and {len(text.held_out):,} held out, "
        f"{len(text.words):,} distinct kept, unigram entropy {text.entropy:.3f} nats per word"
    )
    torch.manual_seed(settings.seed)
    model = WordModel(text.unigram, settings.hidden).to(settings.device)
    train(model, text, settings, record)
    record.held_out = evaluate(model, text, settings, count=4 if few else 16)
    record.continuations = _continuations(model, text, settings)
    record.compared_batches = 1 if few else 3
    batches = training_batches(text, settings)
    chosen = [
        next(batches).to(torch.device(settings.device)) for _ in range(record.compared_batches)
    ]
    compare(model, chosen, settings, record, curve)


def _print(text: str) -> None:
    print(textwrap.fill(text, shutil.get_terminal_size().columns), flush=True)


def _continuations(model: WordModel, text: Text, settings: Settings) -> list[Continuation]:
    beginnings = text.beginnings(_CONTINUATIONS, _BEGINNING)
    if not beginnings.numel():
        return []
    never = torch.arange(settings.vocab) >= len(text.words)
    never[UNKNOWN_NUMBER] = True
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    sampled = model.continuation(
        beginnings.to(settings.device),
        _CONTINUED,
        END_NUMBER,
        never.to(settings.device),
        generator,
    )
    return [
        Continuation(text.show(beginning), text.show(words))
        for beginning, words in zip(beginnings.T.tolist(), sampled, strict=True)
    ]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _vocabulary(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, got {value}")
    return value
