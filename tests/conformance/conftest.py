"""Fixtures of several files here."""

from __future__ import annotations

import sys

import pytest
import ranks


def run(request, world):
    temporary = request.getfixturevalue("tmp_path_factory")
    return ranks.run_on(world, request.module.SCENARIOS, request.module.__name__, temporary)


@pytest.fixture(scope="module", params=[2, ranks.THREE], ids="{}-processes".format)
def world(request):
    """Return the number of processes that run the scenarios of a file."""
    return request.param


@pytest.fixture(scope="module")
def seen(request, world):
    """Return the records that each process made of the scenarios of a file."""
    return run(request, world)


@pytest.fixture(scope="module")
def pair(request):
    """The same of two processes."""
    return run(request, 2)


@pytest.fixture
def forget_accelerate():
    """Accelerate's state is one per process; no test may leave it to the next."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
