"""Rows whose state is put back to their initial state before some steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumext.recurrence._states import State, called, freeze, tensors
from accumext.tensors.checks import fail_type, fail_value, type_name


@dataclass(frozen=True)
class Resets:
    """The rows that are reset, and the steps before which they are."""

    rows: Tensor  # bool [T, B]
    steps: frozenset[int]  # those before which a row may be reset; at step 0 every row is

    def at(self, step: int, active: Tensor | None) -> Tensor:
        """The rows [B] that are reset before this step: none that is inactive."""
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
        """The state before this step, with its rows reset."""
        if step not in self.steps:
            return state
        for now, first in zip(tensors(state), tensors(initial), strict=False):
            if now.shape != first.shape:  # a cell would read the zeros behind what it began with
                contract = "keep the shapes of its state where rows are reset"
                advice = "Keep a cache as long as it gets, and how much of it each row has, [B]"
                got = f"{list(now.shape)} after {list(first.shape)}"
                fail_value(op, called(op), contract, got, advice)
        return freeze(op, ~self.at(step, active), state, initial, batch_dim)


def resets_of(
    op: str, value: Any, shape: tuple[int, int], state: State, device: torch.device, whose: str
) -> Resets:
    """The argument `resets`, checked: a mask [T, B] on this device or on a CPU, where the host can
    read it. Elsewhere it does not wait for it, and before every step a row may begin anew."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        fail_type(op, "resets", "be a bool tensor [T, B]", type_name(value))
    if state is None:
        fail_value(op, "state", "be given where rows are reset to it", None)
    if value.shape != shape:
        fail_value(op, "resets", f"have shape {list(shape)}", list(value.shape))
    if value.device.type != "cpu" and value.device != device:
        fail_value(op, "resets", f"be on {whose}, {device}, or on a CPU", value.device)
    return _known(value, device)


def _known(rows: Tensor, device: torch.device) -> Resets:
    known = rows[1:].any(1).tolist() if rows.device.type == "cpu" else [True] * (len(rows) - 1)
    steps = frozenset(step for step, any_row in enumerate(known, 1) if any_row)
    return Resets(rows.to(device, copy=True), steps)  # the pass back reads them again
