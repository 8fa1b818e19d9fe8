"""The CUDA kernels compiled for the host."""

import shutil
from collections.abc import Callable
from pathlib import Path

import host_cuda
import pytest
from host_cuda import ARCH, ptx
from support.once import once
from support.programs import compiler

import accumext


@pytest.fixture(scope="session")
def host_compiler() -> None:
    if shutil.which(compiler()[0]) is None:
        pytest.skip("no C++ compiler")


@pytest.fixture(scope="session")
def host_executable(
    host_compiler: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[str], Path]:
    """Source in host_cuda/ -> executable, compiled once by all workers together."""
    if ARCH is not None and not ptx.available():
        pytest.skip("no nvcc")

    def compiled(name: str) -> Path:
        def build(folder: Path) -> None:
            if ARCH is None or name not in ptx.SOURCES:
                host_cuda.build(name, folder)
                return
            # Its own kernels do not run.
            driver = host_cuda.build(name, folder, "-O0", "-fno-sanitize=undefined")
            ptx.build(driver, ARCH, pytestconfig.cache.mkdir("ptx")).replace(driver)

        return once(tmp_path_factory, f"host-{name}", build) / name

    return compiled


@pytest.fixture(scope="module")
def compiled_kernels() -> None:
    """Where CUDA kernels should answer: torch's own would pass most tests, too."""
    if accumext.backend() != "cuda":
        pytest.skip(accumext.backend_reason())
