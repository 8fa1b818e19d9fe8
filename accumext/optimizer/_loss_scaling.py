"""Loss scales: of the GradScaler that the optimizer was given, and of one around its step.

The only file that knows how `torch.amp.GradScaler` works inside.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from accumext import _scalars
from accumext._checks import fail_value, message
from accumext._scalars import Scalar, as_tensor, to_host_if_free
from accumext._torch_private import (
    OptState,
    not_compiled,
    optimizer_states,
    saved_factor,
    scale_tensor,
    write_count,
)
from accumext.optimizer._arguments import OP, Settings

# Operations after scaler.scale that are looked through, as in `scaler.scale(loss) / n`.
_STEPS_FROM_SCALE = 4


class LossScale(NamedTuple):
    """What a loss was multiplied with; equal keys mean equal values, None says nothing."""

    value: Scalar = 1.0
    key: tuple[int, int] | None = None  # for a value that only the device knows
    weight_unit: Scalar | None = None  # the loss was multiplied with its weight over this, too


UNSCALED = LossScale()


class LossScaling:
    """The scaler that the optimizer was given, if any."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def scale_loss(
        self, op: str, loss: Tensor, optimizers: tuple[object, object]
    ) -> tuple[Tensor, LossScale]:
        """`loss * scale`, and the scale; without a scaler the loss itself.

        Raises:
            ValueError: the loss is scaled already.
            RuntimeError: as `refuse_unscaled`.
        """
        scaler = self._settings.scaler
        if scaler is None:
            return loss, UNSCALED
        scale = scale_tensor(scaler)
        if scale is not None and _is_scaled_with(loss, scale):
            contract = "be unscaled where the optimizer was given the scaler, which it scales with"
            advice = "Pass the loss itself: opt.backward(loss)"
            fail_value(op, "loss", contract, "scaler.scale(loss)", advice)
        self.refuse_unscaled(op, optimizers)
        return scaler.scale(loss), self.current(op)

    def current(self, op: str) -> LossScale:
        """The scale in force now."""
        scaler = self._settings.scaler
        if scaler is None:
            return UNSCALED
        scale = scale_tensor(scaler)
        if scale is None:
            advice = "Use opt.backward(loss), or scaler.scale(loss).backward() with the same scaler"
            got = "a scaler that has not scaled any"
            raise RuntimeError(message(op, "the loss", "be scaled first", got, advice))
        if _scalars.on_host(scale):
            return LossScale(float(scale))
        return LossScale(scale.double(), (id(scale), write_count(scale)))

    def create_scale(self, device: torch.device) -> None:
        """Make the scaler create its scale if it has none, as its first `scale` call does."""
        scaler = self._settings.scaler
        if scaler is not None and scale_tensor(scaler) is None:
            scaler.scale(torch.zeros((), device=device))

    def same_as(self, op: str, scale: LossScale) -> LossScale:
        """The scale in force now, with its key, if that is its value; else `scale` itself."""
        current = self.current(op)
        return current if bool(current.value == scale.value) else scale

    def refuse_unscaled(self, op: str, optimizers: tuple[object, object]) -> None:
        """Raise if `scaler.unscale_` was called for one of these, which unscales by itself."""
        scaler = self._settings.scaler
        if scaler is None:
            return
        states = optimizer_states(scaler)
        for optimizer in optimizers:
            if id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED:
                contract = "be unscaled by the optimizer alone, which was given the scaler"
                advice = (
                    "Leave scaler.unscale_ out: clip with max_norm, look at opt.last.total_norm"
                )
                got = "gradients that scaler.unscale_ has unscaled"
                raise RuntimeError(message(op, ".grad", contract, got, advice))

    def refuse_to_forget_others(self, op: str, optimizer: object) -> None:
        """Raise if `update` would let the scaler forget that it has unscaled another optimizer."""
        scaler = self._settings.scaler
        for key, state in () if scaler is None else optimizer_states(scaler).items():
            if key != id(optimizer) and state["stage"] is OptState.UNSCALED:
                contract = "have no optimizer that is unscaled and has not stepped"
                advice = "Call scaler.step for that one first"
                raise RuntimeError(message(op, "the scaler", contract, "one", advice))

    def begin_update(self, device: torch.device) -> object:
        """What `update` takes; the scaler of a copy, which has no scale yet, creates it."""
        scaler = self._settings.scaler
        if scaler is None:
            return None
        if scale_tensor(scaler) is None:
            self.create_scale(device)
        return optimizer_states(scaler)

    def has_updated(self, begun: object) -> bool:
        """Whether there was an update since `begin_update` returned `begun`: it replaces that."""
        scaler = self._settings.scaler
        return scaler is not None and optimizer_states(scaler) is not begun

    @not_compiled  # torch.compile loses the record
    def update(
        self, begun: object, optimizer: object, found_inf: Scalar, device: torch.device
    ) -> None:
        """Update the scale, once, as `scaler.step(optimizer); scaler.update()` does."""
        scaler = self._settings.scaler
        if scaler is None or optimizer_states(scaler) is not begun:
            return
        state = optimizer_states(scaler)[id(optimizer)]
        state["found_inf_per_device"] = {device: as_tensor(found_inf, torch.float32, device)}
        state["stage"] = OptState.STEPPED
        scaler.update()


def _is_scaled_with(loss: Tensor, scale: Tensor) -> bool:
    """Whether `scaler.scale` made this loss, perhaps with a division or the like after it."""
    node = loss.grad_fn
    for _ in range(_STEPS_FROM_SCALE):
        if node is None or not node.name().startswith(("Mul", "Div", "Add", "Neg", "View")):
            return False
        other = saved_factor(node) if node.name() == "MulBackward0" else None
        if isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr():
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


class OuterScale(NamedTuple):
    """What a GradScaler around `step` says of the gradients in `.grad`."""

    scale: LossScale
    found_inf: Tensor | None  # None where it looked at no gradient


def outer_scale(op: str, proxy: object, settings: Settings, accumulated: bool) -> OuterScale:
    """What the GradScaler that is calling `step` has set on the optimizer.

    Args:
        accumulated: whether the optimizer has accumulated gradients since the last step.

    Raises:
        RuntimeError: the outer scaler comes too late, or beside the optimizer's own.
    """
    attributes = vars(proxy)
    if settings.scaler is not None:
        advice = "Leave scaler=None where a GradScaler is called around the optimizer"
        refuse_outer_scale(op, "an outer GradScaler beside its own", advice)
    if accumulated:
        refuse_outer_scale(op, "gradients taken in before the GradScaler could see them")
    scale, found_inf = attributes["grad_scale"], attributes["found_inf"]
    return OuterScale(
        UNSCALED if scale is None else LossScale(to_host_if_free(scale)),
        found_inf if isinstance(found_inf, Tensor) else None,  # the int 0 without gradients
    )


def refuse_outer_scale(op: str, got: str, advice: str | None = None) -> NoReturn:
    """Raise for a GradScaler that calls `step`."""
    advice = advice or f"Pass the scaler to the constructor: {OP}(..., scaler=scaler)"
    contract = "be called directly, not through scaler.step"
    raise RuntimeError(message(op, "step", contract, got, advice))


def forget_scale(attributes: dict[str, Any]) -> None:
    """Remove what GradScaler, or this package in its place, sets on an optimizer for one step."""
    for name in ("grad_scale", "found_inf"):
        attributes.pop(name, None)
