"""The CUDA kernels compiled for the host."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import host_cuda
import pytest
from support.once import once
from support.programs import compiler

import accumext


@pytest.fixture(scope="session")
def host_executable(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Source in host_cuda/ -> executable, compiled once by all workers together."""
    if shutil.which(compiler()[0]) is None:
        pytest.skip("no C++ compiler")

    def compiled(name: str) -> Path:
        def build(folder: Path) -> None:
            host_cuda.build(name, folder)

        return once(tmp_path_factory, f"host-{name}", build) / name

    return compiled


@pytest.fixture(scope="module")
def compiled_kernels() -> None:
    """Where CUDA kernels should answer: torch's own would pass most tests, too."""
    if accumext.backend() != "cuda":
        pytest.skip(accumext.backend_reason())
