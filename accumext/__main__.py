"""`python -m accumext`: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

import accumext
from accumext import demo
from accumext.auditing import cli as audit
from accumext.backends import _doctor

INTERRUPTED, CLOSED_PIPE = 130, 141  # exit codes after SIGINT and SIGPIPE, as shells have them


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
    """`main` without a traceback after Ctrl-C, or where a reader such as `head` has seen enough."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes the stream once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


if __name__ == "__main__":
    sys.exit(run_as_program())
