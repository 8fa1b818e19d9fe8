"""What AccumulatingOptimizer has to know of a trainer around it."""

from __future__ import annotations

import sys
from types import CellType
from typing import Any

from accumext import _checks


def refuse_second_accumulation(op: str, window: int) -> None:
    """RuntimeError where Accelerate leaves out steps itself: the two windows would multiply.

    Its state is one per process, and says nothing before Accelerate is imported. Other trainers
    keep theirs to themselves: several backward passes before a step may be a micro-batch.
    """
    state = None if window == 1 else sys.modules.get("accelerate.state")
    if state is None:
        return
    steps = state.GradientState().num_steps
    if steps > 1:
        got = f"window={window} and gradient_accumulation_steps={steps}"
        advice = "Pass gradient_accumulation_steps=1 to Accelerator, or window=1 to the optimizer"
        contract = "be 1 where Accelerate accumulates too"
        raise RuntimeError(_checks.message(op, "window", contract, got, advice))


def tell_of_a_skipped_step(optimizer: object) -> None:
    """Have Accelerate know, under a GradScaler, that no step was taken: its schedules wait then.

    It takes a call of `step` for a step taken, and wraps `step` for that while the scaler runs.
    """
    module = sys.modules.get("accelerate.optimizer")
    wrapping = getattr(vars(optimizer).get("step"), "__closure__", None)
    if module is None or wrapping is None:
        return
    for cell in wrapping:
        holder = _contents(cell)
        if isinstance(holder, module.AcceleratedOptimizer):
            holder._accelerate_step_called = False


def _contents(cell: CellType) -> Any:
    """What a variable of a closure holds; None while it is not set."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
