"""Faults that tests put into a copy of csrc: all of them at once, each behind a condition, so that
the copy is compiled once. The variable HOST_CUDA_MUTANT switches on the one of this number."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accumext.backends import _build

VARIABLE = "HOST_CUDA_MUTANT"


class Mutant(NamedTuple):
    """A change to the text of a source."""

    name: str
    shown_by: str  # the call, or the selection of tests, that finds it
    words: str  # what is said of it then
    file: str  # in csrc/cuda
    old: str  # what is found there exactly once
    new: str  # what stands in its place, with MUTANT for the condition


def write_sources(folder: Path, mutants: Sequence[Mutant]) -> None:
    """A copy of csrc with these mutants; ValueError if the text of one is not there once."""
    shutil.copytree(_build.csrc(), folder)
    for number, mutant in enumerate(mutants):
        path = folder / "cuda" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.file} has not once {mutant.old!r}")
        condition = f"host_cuda::mutant({number})"
        path.write_text(text.replace(mutant.old, mutant.new.replace("MUTANT", condition)))
