"""What is known of Accelerate, from modules that look like its own."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from accumext.optimizer._proxy import refuse_second_accumulation, tell_of_a_skipped_step


@pytest.fixture
def steps(monkeypatch):
    """Sets `gradient_accumulation_steps` of this process; None: Accelerate is not imported."""

    def of(count):
        state = SimpleNamespace(GradientState=lambda: SimpleNamespace(num_steps=count))
        if count is None:
            monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
        else:
            monkeypatch.setitem(sys.modules, "accelerate.state", state)

    return of


@pytest.mark.parametrize(("window", "count"), [(4, None), (4, 1), (1, 4), (1, 1), (2, 3)])
def test_only_one_of_both_may_accumulate(steps, window, count):
    steps(count)
    text = "op: window must be 1 where Accelerate accumulates too, got window=2 and "
    text = re.escape(text + "gradient_accumulation_steps=3. Pass")
    with pytest.raises(RuntimeError, match=text) if window == 2 else nullcontext():
        refuse_second_accumulation("op", window)


class AcceleratedOptimizer:
    """As Accelerate's: takes a call of `step` for a step."""

    def __init__(self):
        self._accelerate_step_called = True


def wrapped_by(*holders):
    """An optimizer whose `step` Accelerate has wrapped: its variables are in the closure."""
    first, last = holders

    def step():
        return first, unset, last

    optimizer = SimpleNamespace(step=step)
    if optimizer is None:  # never: a variable of the closure that is not set, as there may be one
        unset = None
    return optimizer


@pytest.mark.parametrize("imported", [True, False], ids=["", "without-accelerate"])
@pytest.mark.parametrize("wraps", [True, False], ids=["", "a-step-of-others"])
def test_the_accelerated_optimizer_hears_that_no_step_was_taken(monkeypatch, imported, wraps):
    fake = SimpleNamespace(AcceleratedOptimizer=AcceleratedOptimizer)
    monkeypatch.setitem(sys.modules, "accelerate.optimizer", fake)
    if not imported:
        monkeypatch.delitem(sys.modules, "accelerate.optimizer")
    holder, other = AcceleratedOptimizer(), SimpleNamespace(_accelerate_step_called=True)
    tell_of_a_skipped_step(wrapped_by(other, holder) if wraps else SimpleNamespace(holder=holder))
    assert holder._accelerate_step_called == (not (imported and wraps))
    assert other._accelerate_step_called
