"""Rows whose state is set back to their initial state before some steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumext.recurrence._states import State, called, freeze, tensors
from accumext.tensors.checks import fail_type, fail_value, type_name


@dataclass(frozen=True)
class Resets:
    """The rows that are reset, and the steps before which that happens."""

    rows: Tensor  # bool [T, B]
    steps: frozenset[int]  # steps after 0 before which a row may be reset

    def at(self, step: int, active: Tensor | None) -> Tensor:
        """Return the rows [B] that are reset before this step, without inactive ones."""
        return self.rows[step] if active is None else self.rows[step] & active[step]

    def apply(
        self,
        op: str,
        step: int,
        active: Tensor | None,
        state: State,
        initial: State,
        batch_dim: int,
    ) -> State:
        """Return the state before this step, with its rows reset."""
        if step not in self.steps:
            return state
        for now, first in zip(tensors(state), tensors(initial), strict=False):
            if now.shape != first.shape:  # a shorter one would get zeros, which a cell reads
                contract = "keep the shapes of its state if rows are reset"
                advice = "Keep a cache as long as it gets, and how much of it each row has, [B]"
                got = f"{list(now.shape)} after {list(first.shape)}"
                fail_value(op, called(op), contract, got, advice)
        return freeze(op, ~self.at(step, active), state, initial, batch_dim)


def resets_of(
    op: str, value: Any, shape: tuple[int, int], state: State, device: torch.device, whose: str
) -> Resets:
    """Check the argument `resets`, a mask [T, B] on this device or a CPU, and return it. The host
    reads a mask on a CPU. It does not wait for a GPU: then any step may have resets."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        fail_type(op, "resets", "be a bool tensor [T, B]", type_name(value))
    if state is None:
        fail_value(op, "state", "be given if rows are reset to it", None)
    if value.shape != shape:
        fail_value(op, "resets", f"have shape {list(shape)}", list(value.shape))
    if value.device.type != "cpu" and value.device != device:
        fail_value(op, "resets", f"be on {whose}, {device}, or on a CPU", value.device)
    return _known(value, device)


def _known(rows: Tensor, device: torch.device) -> Resets:
    known = rows[1:].any(1).tolist() if rows.device.type == "cpu" else [True] * (len(rows) - 1)
    steps = frozenset(step for step, any_row in enumerate(known, 1) if any_row)
    return Resets(rows.to(device, copy=True), steps)  # the backward pass reads them again
