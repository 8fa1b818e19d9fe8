"""What every test shares: a seed, readable dtype ids, and which backend is under test."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch
from support.tensors import FLOAT_DTYPES, dtype_id

with suppress(ImportError):  # on a machine with a GPU it may be missing
    from hypothesis import settings

    settings.register_profile("nightly")  # --hypothesis-profile=nightly: the long state machine


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
