"""Programs that tests run: the compiler, and scripts of the checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import ROOT, forks

# Variables of a program and of those that it starts: a warning of ours is an error.
_OURS = ("AccumulatingOptimizer", "decode_loss", "tbptt", "rollout", "chunked_loss", "generate")
NO_WARNINGS = {"PYTHONWARNINGS": ",".join(f"error:{op}:UserWarning" for op in _OURS)}


def compiler() -> list[str]:
    return (os.environ.get("CXX") or "c++").split()


def executable(path: Path, script: str) -> str:
    """Write a shell script and return its path."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def sanitizer_runtime(name: str) -> Path | None:
    """A library of the compiler that a program which was not built for a sanitizer has to preload;
    None if it is missing."""
    command = [*compiler(), f"-print-file-name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    return path.resolve() if path.is_absolute() and path.exists() else None


def _environment() -> dict[str, str]:
    """Of a program that finds accumext in the checkout, and whose warnings of ours are errors."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": search} | NO_WARNINGS


def run_script(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a script of the checkout, or what else Python runs, in a fork that has imported torch."""
    return forks.run(*arguments, cwd=cwd, env=_environment(), timeout=500)


def run_python(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run it in a new interpreter: what needs no torch, or is about its start or its memory."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=_environment(),
        capture_output=True,
        text=True,
    )


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a program printed; it succeeded, and accumext warned of nothing in it."""
    assert done.returncode == 0, done.stderr
    assert _OURS[0] not in done.stderr  # nor at its end, where a warning is no error
    return done.stdout


def run_bench(script: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark; return the JSON that it writes into a folder, and its output."""
    path = folder / "result.json"
    printed = output_of(run_script(f"bench/{script}.py", f"--json={path}", *arguments))
    return json.loads(path.read_text()), printed
