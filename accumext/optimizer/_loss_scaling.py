"""Loss scales: of the GradScaler that the optimizer was given, and of one around its step.

The only file that touches the private attributes of `torch.amp.GradScaler`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState

from accumext._checks import message
from accumext._scalars import Scalar, as_tensor, to_host_if_free
from accumext.optimizer._arguments import OP, Settings


class LossScale(NamedTuple):
    """What a loss was multiplied with; equal keys mean equal values, None says nothing."""

    value: Scalar = 1.0
    key: tuple[int, int] | None = None  # for a value that only the device knows


UNSCALED = LossScale()


class LossScaling:
    """The scaler that the optimizer was given, if any."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def scale_tensor(self) -> Tensor | None:
        """The scale in force on its device; None before the first loss, and without a scaler."""
        scaler = self._settings.scaler
        return None if scaler is None else scaler._get_scale_async()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """`loss * scale`; the loss itself without a scaler."""
        scaler = self._settings.scaler
        return loss if scaler is None else scaler.scale(loss)

    def current(self, op: str) -> LossScale:
        """The scale in force now."""
        scaler = self._settings.scaler
        if scaler is None:
            return UNSCALED
        scale = scaler._get_scale_async()
        if scale is None:
            advice = "Use opt.backward(loss), or scaler.scale(loss).backward() with the same scaler"
            got = "a scaler that has not scaled any"
            raise RuntimeError(message(op, "the loss", "be scaled first", got, advice))
        value = to_host_if_free(scale)
        return LossScale(value, (id(scale), scale._version) if isinstance(value, Tensor) else None)

    def create_scale(self, device: torch.device) -> None:
        """Make the scaler create its scale if it has none, as its first `scale` call does."""
        scaler = self._settings.scaler
        if scaler is not None and scaler._get_scale_async() is None:
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
        states = scaler._per_optimizer_states
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
        for key, state in () if scaler is None else scaler._per_optimizer_states.items():
            if key != id(optimizer) and state["stage"] is OptState.UNSCALED:
                contract = "have no optimizer that is unscaled and has not stepped"
                advice = "Call scaler.step for that one first"
                raise RuntimeError(message(op, "the scaler", contract, "one", advice))

    @property
    def epoch(self) -> object:
        """An object that `update` replaces; so it tells whether there was an update."""
        scaler = self._settings.scaler
        return None if scaler is None else scaler._per_optimizer_states

    @_disable_dynamo  # torch.compile loses the record
    def update(self, optimizer: object, found_inf: Scalar, device: torch.device) -> None:
        """Update the scale as `scaler.step(optimizer); scaler.update()` does."""
        scaler = self._settings.scaler
        assert scaler is not None
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {device: as_tensor(found_inf, torch.float32, device)}
        state["stage"] = OptState.STEPPED
        scaler.update()


class OuterScale(NamedTuple):
    """What a GradScaler around `step` says of the gradients in `.grad`."""

    scale: LossScale
    found_inf: Tensor | None  # None where it looked at no gradient


def outer_scale(op: str, attributes: dict[str, Any], own: bool, taken: bool) -> OuterScale | None:
    """What the GradScaler that is calling `step` has set; None where no scaler is.

    Args:
        attributes: of the optimizer, where `GradScaler.step` sets `grad_scale` and `found_inf`.
        own: whether the optimizer has a scaler of its own.
        taken: whether it has taken in gradients since the last step.

    Raises:
        RuntimeError: the outer scaler comes too late, or beside the optimizer's own.
    """
    if "found_inf" not in attributes:
        return None
    contract = "be called directly, not through scaler.step"
    if own:
        advice = "Leave scaler=None where a GradScaler is called around the optimizer"
        got = "an outer GradScaler beside its own"
        raise RuntimeError(message(op, "step", contract, got, advice))
    if taken:
        got = "gradients taken in before the GradScaler could see them"
        advice = f"Pass the scaler to the constructor: {OP}(..., scaler=scaler)"
        raise RuntimeError(message(op, "step", contract, got, advice))
    scale, found_inf = attributes["grad_scale"], attributes["found_inf"]
    return OuterScale(
        UNSCALED if scale is None else LossScale(to_host_if_free(scale)),
        found_inf if isinstance(found_inf, Tensor) else None,  # the int 0 without gradients
    )


def forget_scale(attributes: dict[str, Any]) -> None:
    """Remove what GradScaler, or this package in its place, sets on an optimizer for one step."""
    for name in ("grad_scale", "found_inf"):
        attributes.pop(name, None)
