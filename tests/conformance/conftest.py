"""What tests of several files here need."""

from __future__ import annotations

import sys

import pytest
import ranks


@pytest.fixture(scope="module", params=[2, 3], ids="{}-processes".format)
def world(request):
    """How many processes run the scenarios of a file, which may say another number."""
    return request.param


@pytest.fixture(scope="module")
def seen(request, world, tmp_path_factory):
    """What each process saw of the scenarios of a file."""
    module = request.module
    return ranks.run_on(world, module.SCENARIOS, module.__name__, tmp_path_factory)


@pytest.fixture
def forget_accelerate():
    """Accelerate's state is one per process; no test may leave it to the next."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
