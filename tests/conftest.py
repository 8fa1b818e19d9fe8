"""What every test shares: workers, a seed, readable dtype ids, and which backend is under test."""

from __future__ import annotations

import os

# One thread for each worker and for the processes that tests start, since the workers fill the
# cores, and most tensors here are tiny. It has to stand there before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from support import matrix
from support.tensors import FLOAT_DTYPES, dtype_id

try:
    from support import budget
except ImportError:  # on a machine with a GPU Hypothesis may be missing
    pass
else:
    budget.register()

WORKERS = 8  # at most: each imports torch


def only_named(config: pytest.Config) -> bool:
    """Whether the command line names its tests one by one."""
    return all("::" in argument for argument in config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return 0 if only_named(config) else min(WORKERS, len(os.sched_getaffinity(0)))


def pytest_configure(config: pytest.Config) -> None:
    """A test that is named runs, whatever its markers: `-m` in pyproject.toml is for the others."""
    if only_named(config) and config.option.markexpr in config.getini("addopts"):
        config.option.markexpr = ""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    matrix.mark_the_rest(items)


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


def pytest_report_header() -> str:
    return f"ACCUMEXT_BACKEND={os.environ.get('ACCUMEXT_BACKEND', 'auto')}"
