"""What has to be known of Accelerate, which is never imported: only a user's import counts."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from accumext.tensors import checks


def is_accelerated(optimizer: object) -> bool:
    """Tell whether an optimizer is an AcceleratedOptimizer, which wraps another."""
    kind: Any = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())
    return isinstance(optimizer, kind)


def _accumulation_steps() -> int:
    """Return after how many backward passes Accelerate steps; one number per process."""
    state = sys.modules.get("accelerate.state")
    return 1 if state is None else state.GradientState().num_steps


def refuse_prepared(op: str, optimizer: Any) -> None:
    """Raise ValueError for a wrapped optimizer that Accelerate has prepared, if it skips steps: it
    would lose whole windows, and its scaler would not know of windows that are skipped here."""
    if not is_accelerated(optimizer):
        return
    steps = _accumulation_steps()
    if optimizer.scaler is not None or steps > 1:
        reason = f"gradient_accumulation_steps={steps}" if steps > 1 else "a GradScaler"
        contract = "be wrapped before Accelerate prepares it"
        advice = f"Wrap the inner one, then prepare that: accelerator.prepare({op}(optimizer, ...))"
        checks.fail_value(op, "optimizer", contract, f"AcceleratedOptimizer with {reason}", advice)


def refuse_second_accumulation(op: str, window: int) -> None:
    """Raise RuntimeError if Accelerate accumulates gradients, too: the two windows would multiply.

    For other trainers this cannot be checked: several backward passes before a step may be one
    micro-batch.
    """
    steps = 1 if window == 1 else _accumulation_steps()
    if steps > 1:
        got = f"window={window} and gradient_accumulation_steps={steps}"
        advice = "Pass gradient_accumulation_steps=1 to Accelerator, or window=1 to the optimizer"
        contract = "be 1 if Accelerate accumulates too"
        raise RuntimeError(checks.message(op, "window", contract, got, advice))


def tell_of_a_skipped_step(optimizer: object) -> None:
    """Let Accelerate know, under a GradScaler, that no step was taken, so that its schedules wait.

    While the scaler runs, Accelerate wraps `step`, and takes its call for a step taken.
    """
    for cell in getattr(vars(optimizer).get("step"), "__closure__", None) or ():
        with suppress(ValueError):  # a variable of the closure that is not set
            if is_accelerated(cell.cell_contents):
                cell.cell_contents._accelerate_step_called = False
