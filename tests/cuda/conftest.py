"""The CUDA kernels compiled for the host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import host_cuda
import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def host_executable(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Source in host_cuda/ -> executable, compiled once by all workers together."""
    if shutil.which(host_cuda.compiler()[0]) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def compiled(name: str) -> Path:
        with FileLock(folder / f"{name}.lock"):
            if not (folder / name).exists():
                host_cuda.build(name, folder)
        return folder / name

    return compiled
