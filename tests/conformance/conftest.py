"""Fixtures of several files here."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def forget_accelerate():
    """Accelerate's state is one per process; no test may leave it to the next."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
