"""`python -m accumext`: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import accumext

INTERRUPTED, CLOSED_PIPE = 130, 141  # exit codes after SIGINT and SIGPIPE, as shells have them
COMMANDS = {
    "doctor": "which kernels are in use, why, how to get better ones; self-test",
    "demo": "train a decoder on real text, beside plain PyTorch",
    "audit": "run a training script, and say what its loop does wrongly",
}


def module_of(command: str) -> Any:
    """Import the module of a command, and nothing that only other commands need."""
    if command == "doctor":
        from accumext.backends import _doctor

        return _doctor
    if command == "audit":
        from accumext.auditing import cli

        return cli
    package = Path(__file__).parent
    if not (package / "demo").is_dir():  # in a checkout it is one of the examples
        accumext.__path__.append(str(package.parent / "examples"))
    return import_module("accumext.demo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m accumext", description=accumext.__doc__)
    parser.add_argument(
        "--version",
        action="version",
        version=f"accumext {accumext.__version__} (torch {torch.__version__})",
    )
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if [*argv[:1]] == [name]:  # options before a command print something and end the program
            module = module_of(name)
            module.add_arguments(command)
            command.set_defaults(run=module.main)
    if [*argv[:1]] and argv[0] not in COMMANDS and Path(argv[0]).is_file():
        parser.error(f"{argv[0]} is a file. To see what its loop does: audit {argv[0]}")
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help()
        return 0
    code: int = args.run(args)
    return code


def run_as_program() -> int:
    """Run `main`, without a traceback after Ctrl-C or if a reader such as `head` stops reading."""
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
