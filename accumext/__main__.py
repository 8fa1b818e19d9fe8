"""`python -m accumext`: the command line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import torch

import accumext
from accumext import demo
from accumext.audit import cli as audit
from accumext.backend import _doctor
from accumext.demo.cli import INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m accumext", description=accumext.__doc__)
    parser.add_argument(
        "--version",
        action="version",
        version=f"accumext {accumext.__version__} (torch {torch.__version__})",
    )
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="command")
    for name, module, summary in (
        ("doctor", _doctor, "which kernels are in use, why, how to get better ones; self-test"),
        ("demo", demo, "train a decoder on real text, beside plain PyTorch"),
        ("audit", audit, "run a training script, and say what its loop does wrongly"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help()
        return 0
    code: int = args.run(args)
    return code


def run_as_program() -> int:
    """`main` with a Ctrl-C that leaves no traceback.

    Until here, while Python imports the package and torch, the signal ends the process at once (see
    `accumext/__init__.py`), and so it does after, while Python shuts down. In between commands get
    the usual KeyboardInterrupt, so that they can clean up.
    """
    at_once = signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    try:
        if at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if at_once:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(run_as_program())
