"""The CUDA kernels compiled for the host."""

import shutil
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
    if not host_cuda.has_sanitizers():
        pytest.skip("the compiler has no AddressSanitizer")


@pytest.fixture(scope="session")
def library(
    host_compiler: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    """The library of host_cuda, compiled once for all workers."""
    if ARCH is not None and not ptx.available():
        pytest.skip("no nvcc")

    def build(folder: Path) -> None:
        kernels = None if ARCH is None else ptx.build(ARCH, pytestconfig.cache.mkdir("ptx"))
        host_cuda.build_library(folder, kernels=kernels)

    return once(tmp_path_factory, "host-cuda", build) / "launchers.so"


@pytest.fixture(scope="module")
def compiled_kernels() -> None:
    """Where CUDA kernels should answer: torch's own would pass most tests, too."""
    if accumext.backend() != "cuda":
        pytest.skip(accumext.backend_reason())
