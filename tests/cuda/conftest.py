"""The CUDA kernels compiled for the host."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import host_cuda
import pytest
import torch
from host_cuda import ARCH, DEFAULT_ARCH, ptx
from support.once import once
from support.programs import compiler
from torch import Tensor

import accumext


@pytest.fixture(scope="session")
def host_compiler() -> None:
    if shutil.which(compiler()[0]) is None:
        pytest.skip("no C++ compiler")
    if not host_cuda.has_sanitizers():
        pytest.skip("the compiler has no AddressSanitizer")


@pytest.fixture(scope="session")
def host_library(host_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of host_cuda, compiled once for all workers."""
    return once(tmp_path_factory, "host-cuda", host_cuda.build_library) / "launchers.so"


@pytest.fixture(scope="session")
def nvcc_library(
    host_library: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    """The same library with nvcc's kernels."""
    if not ptx.available():
        pytest.skip("no nvcc")

    def build(folder: Path) -> None:
        kernels = ptx.build(ARCH or DEFAULT_ARCH, pytestconfig.cache.mkdir("ptx"))
        objects = [*host_library.parent.glob("*.o"), *kernels]
        host_cuda.link(objects, folder, *host_cuda.SANITIZERS[:1])

    return once(tmp_path_factory, "nvcc-cuda", build) / "launchers.so"


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("host_library" if ARCH is None else "nvcc_library")


@pytest.fixture(scope="module")
def compiled_kernels() -> None:
    """Where CUDA kernels should answer: torch's own would pass most tests, too."""
    if accumext.backend() != "cuda":
        pytest.skip(accumext.backend_reason())


@pytest.fixture(scope="module")
def products_that_choose() -> Iterator[None]:
    """The product with a unit matrix, or with columns of one, has rows or columns of the other
    operand, even of infinities."""

    def unit_rows(matrix: Tensor) -> Tensor | None:
        at = matrix.abs().argmax(1)
        units = torch.zeros_like(matrix).scatter_(1, at[:, None], 1.0)
        return at if torch.equal(matrix, units) else None

    def product(self: Tensor, mat2: Tensor, *, out: Tensor) -> Tensor:
        if (at := unit_rows(mat2.t())) is not None:
            return out.copy_(self[:, at])
        if (at := unit_rows(self)) is not None:
            return out.copy_(mat2[at])
        return out.copy_(self @ mat2)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own is overridden
        library.impl("mm.out", product, "CPU")
    yield
    library._destroy()
