"""`python -m accumext`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from accumext import demo
from accumext.backend import _doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m accumext", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, module, summary in (
        ("doctor", _doctor, "which kernels are in use, why, how to get better ones; self-test"),
        ("demo", demo, "train a decoder on real text, beside plain PyTorch"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
