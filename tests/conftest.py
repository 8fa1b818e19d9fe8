"""What every test shares: a seed, readable dtype ids, and which backend is under test."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor

with suppress(ImportError):  # on a machine with a GPU it may be missing
    from hypothesis import settings

    settings.register_profile("nightly")  # --hypothesis-profile=nightly: the long state machine

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shifted(tensor: Tensor, shift: int) -> Tensor:
    """The values of a vector in a slice of NaN, `shift` elements past an aligned address."""
    base = tensor.new_full((tensor.numel() + shift + 16,), math.nan)
    return base[shift : shift + tensor.numel()].copy_(tensor)


def assert_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal bit for bit but for the payload of a NaN, on whatever devices."""
    for got, want in zip(actual, expected, strict=True):
        got, want = got.cpu(), want.cpu()
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        number = ~want.isnan()
        assert torch.equal(got.signbit()[number], want.signbit()[number])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=FLOAT_DTYPES, ids=dtype_id)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=FLOAT_DTYPES, ids=lambda dtype: f"main-{dtype_id(dtype)}")
def main_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=FLOAT_DTYPES, ids=lambda dtype: f"grad-{dtype_id(dtype)}")
def grad_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def two_threads():
    """Thread counts to compare, restored afterwards."""
    before = torch.get_num_threads()
    yield (1, 2)
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def host_executable(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Source in host_cuda/ -> executable, compiled once by all workers together."""
    import host_cuda

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


def pytest_report_header() -> str:
    return f"ACCUMEXT_BACKEND={os.environ.get('ACCUMEXT_BACKEND', 'auto')}"
