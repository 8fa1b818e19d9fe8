"""The demo's command line."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch

from accumext.demo.compare import compare
from accumext.demo.model import WordModel
from accumext.demo.record import Continuation, Record, Settings, TextFacts
from accumext.demo.report import summary, write_json, write_plot
from accumext.demo.text import load_text
from accumext.demo.train import evaluate, held_out_batches, train, training_batches

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it

_FEW_STEPS = 10  # below, one batch is compared and fewer words are evaluated
_CONTINUATIONS, _SHOWN_CONTEXT, _CONTINUED = 3, 16, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demo."""
    parser.epilog = (
        "Ctrl-C ends the run; what was found until then is printed and written, "
        f"and the exit code is {INTERRUPTED}."
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=20,
        help="optimizer steps of 4 batches each (%(default)s)",
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
        "--plot", type=Path, metavar="FILE", help="write a PNG of memory and loss here"
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code."""
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = _problem(args)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 1
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    record = Record(settings, {"python": platform.python_version(), "torch": torch.__version__})
    begin = time.perf_counter()
    try:
        _run(settings, record)
    except KeyboardInterrupt:
        record.interrupted = True
    record.seconds = time.perf_counter() - begin
    print("\n" + summary(record))
    if args.json is not None:
        write_json(record, args.json)
    if args.plot is not None:
        write_plot(record, args.plot)
    return INTERRUPTED if record.interrupted else 0


def _run(settings: Settings, record: Record) -> None:
    few = settings.steps < _FEW_STEPS
    text = load_text(settings.vocab)
    record.text = TextFacts(len(text.training), len(text.held_out), len(text.words), text.entropy)
    print(
        f"text: Python {record.versions['python']} standard library, {len(text.training):,} words "
        f"to train on and {len(text.held_out):,} held out, {len(text.words):,} distinct kept, "
        f"unigram entropy {text.entropy:.3f} nats per word",
        flush=True,
    )
    torch.manual_seed(settings.seed)
    model = WordModel(text.unigram, settings.hidden).to(settings.device)
    train(model, text, settings, record)
    record.held_out = evaluate(model, text, settings, count=4 if few else 16)

    (batch,) = held_out_batches(text, settings, 1)
    batch = batch.to(torch.device(settings.device))
    continued = model.continuation(batch, _CONTINUED)
    for column in range(min(_CONTINUATIONS, settings.batch)):
        context = batch.context[-_SHOWN_CONTEXT:, column].tolist()
        greedy = continued[:, column].tolist()
        record.continuations.append(Continuation(text.show(context), text.show(greedy)))

    record.compared_batches = 1 if few else 3
    print("comparing with plain PyTorch", file=sys.stderr, flush=True)
    batches = training_batches(text, settings)
    chosen = [
        next(batches).to(torch.device(settings.device)) for _ in range(record.compared_batches)
    ]
    compare(model, chosen, settings, record.comparison)


def _problem(args: argparse.Namespace) -> str | None:
    """What would only come to light at the end, or not be understood there."""
    if args.device == "cuda" and not torch.cuda.is_available():
        return "demo: --device must be usable, got cuda without a GPU that torch can use"
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "demo: --plot must have matplotlib, got none. pip install matplotlib"
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            return f"demo: --{name} must be in a folder that exists, got {path}"
    return None


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
