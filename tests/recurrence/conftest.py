"""What tests of steps that run again share."""

import pytest

from accumext.decoder import _plan


@pytest.fixture
def few_steps_are_kept(monkeypatch):
    """Small graphs are kept, and run once."""
    monkeypatch.setattr(_plan, "KEPT_GRAPH", 2**13)
