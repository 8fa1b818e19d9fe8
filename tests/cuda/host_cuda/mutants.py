"""Faults that tests put into a copy of csrc: all of them at once, each behind a condition, so that
the copy is compiled once. The variable HOST_CUDA_MUTANT switches on the one of this number."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from accumext.backend import _build

VARIABLE = "HOST_CUDA_MUTANT"


class Mutant(Protocol):
    """A change to the text of a source."""

    @property
    def file(self) -> str:
        """In csrc/cuda."""

    @property
    def old(self) -> str:
        """What is found there exactly once."""

    @property
    def new(self) -> str:
        """What stands in its place, with MUTANT for the condition."""


def write_sources(folder: Path, mutants: Sequence[Mutant]) -> None:
    """A copy of csrc with these mutants; ValueError if the text of one is not there once."""
    shutil.copytree(_build.csrc(), folder)
    for number, mutant in enumerate(mutants):
        path = folder / "cuda" / mutant.file
        text = path.read_text()
        count = text.count(mutant.old)
        if count != 1:
            raise ValueError(f"{mutant.file} has {count} times {mutant.old!r}")
        condition = f"host_cuda::mutant({number})"
        path.write_text(text.replace(mutant.old, mutant.new.replace("MUTANT", condition)))
