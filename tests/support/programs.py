"""Programs that tests run: the compiler, and scripts of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys

from support import ROOT


def compiler() -> list[str]:
    return (os.environ.get("CXX") or "c++").split()


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of the checkout, which imports accumext from there."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
    )
