"""Loss scales: of the optimizer's own GradScaler, and of one that calls its step.

The only file of this package that reads or writes what a `torch.amp.GradScaler` keeps inside.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler

from accumext.optimizer._settings import OP
from accumext.tensors import scalars
from accumext.tensors.checks import fail_value, message
from accumext.tensors.scalars import Scalar, as_tensor, on_device, to_host_if_free
from accumext.tensors.torch_private import OptState, optimizer_states, saved_factor, scale_tensor

# How many operations after scaler.scale are searched, as in `scaler.scale(loss) / n`.
_STEPS_FROM_SCALE = 4


def scale_for(op: str, scaler: GradScaler, loss: Tensor, *optimizers: object) -> Scalar:
    """Return the scale by which to multiply a loss; raise if the loss is scaled already."""
    scale, states = scale_tensor(scaler), optimizer_states(scaler)
    if scale is not None and _is_scaled_with(loss, scale):
        contract = "be unscaled if the optimizer was given the scaler, which it scales with"
        advice = "Pass the loss itself: opt.backward(loss)"
        fail_value(op, "loss", contract, "scaler.scale(loss)", advice)
    if states:
        refuse_unscaled(op, scaler, *optimizers)
    if scale is None:
        create_scale(scaler, loss.device)
        return current_scale(op, scaler)
    return float(scale) if scalars.on_host(scale) else scale.double()


def current_scale(op: str, scaler: GradScaler | None) -> Scalar:
    """Return the present scale; raise if the scaler has none."""
    if scaler is None:
        return 1.0
    scale = scale_tensor(scaler)
    if scale is None:
        advice = "Use opt.backward(loss), or scaler.scale(loss).backward() with the same scaler"
        got = "a scaler that has not scaled any"
        raise RuntimeError(message(op, "the loss", "be scaled first", got, advice))
    return float(scale) if scalars.on_host(scale) else scale.double()


def create_scale(scaler: GradScaler | None, device: torch.device) -> None:
    """Make the scaler create its scale if it has none, as its first `scale` call does."""
    if scaler is not None and scale_tensor(scaler) is None:
        scaler.scale(torch.zeros((), device=device))


def refuse_unscaled(op: str, scaler: GradScaler | None, *optimizers: object) -> None:
    """Raise if the user called `scaler.unscale_` for one of these: the wrapper unscales itself."""
    if scaler is None:
        return
    states = optimizer_states(scaler)
    for optimizer in optimizers:
        if id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED:
            contract = "be unscaled by the optimizer alone, which was given the scaler"
            advice = "Leave scaler.unscale_ out: clip with max_norm, look at opt.last.total_norm"
            got = "gradients that scaler.unscale_ has unscaled"
            raise RuntimeError(message(op, ".grad", contract, got, advice))


def begin_update(
    op: str, scaler: GradScaler | None, proxy: object, optimizer: object, device: torch.device
) -> object:
    """Check that the scaler can be updated after the step. A scaler without a scale, as in a copy,
    creates one. Returns its dict of optimizers, which `scaler.update()` replaces: while the scaler
    has this dict, it is not updated yet."""
    if scaler is None:
        return None
    states = optimizer_states(scaler)
    if states:
        refuse_unscaled(op, scaler, proxy, optimizer)
        # `scaler.update` would forget that the scaler has unscaled another optimizer.
        if any(state["stage"] is OptState.UNSCALED for state in states.values()):
            contract = "have no optimizer that is unscaled and has not stepped"
            advice = "Call scaler.step for that one first"
            raise RuntimeError(message(op, "the scaler", contract, "one", advice))
    if scale_tensor(scaler) is None:
        create_scale(scaler, device)
    return optimizer_states(scaler)


def update(
    scaler: GradScaler, begun: object, optimizer: object, found_inf: Scalar, device: torch.device
) -> None:
    """Update the scale as `scaler.step(optimizer); scaler.update()` does, unless it was done."""
    if optimizer_states(scaler) is not begun:
        return
    state = optimizer_states(scaler)[id(optimizer)]
    if on_device(found_inf):
        flag = as_tensor(found_inf, torch.float32, device)
    else:
        flag = torch.full((), found_inf, dtype=torch.float32, device=device)
    state["found_inf_per_device"] = {device: flag}
    state["stage"] = OptState.STEPPED
    scaler.update()


def is_product(loss: Tensor) -> bool:
    """Tell whether a loss may come from `scaler.scale`, by the operations at the end of its graph,
    of which nothing saved is read."""
    return _is_scaled_with(loss, None)


def scalers_in_use() -> list[GradScaler]:
    """Return all GradScalers that have scaled a loss. This looks at every object of the program."""
    known = [o for o in gc.get_objects() if issubclass(type(o), GradScaler)]
    return [one for one in known if one.is_enabled() and scale_tensor(one) is not None]


def has_scaled(scaler: GradScaler, loss: Tensor) -> bool:
    """Tell whether a scaler that is in use has scaled this loss."""
    scale = scale_tensor(scaler)
    return scale is not None and _is_scaled_with(loss, scale)


def _is_scaled_with(loss: Tensor, scale: Tensor | None) -> bool:
    """Tell whether `scaler.scale` made this loss, perhaps with a division or the like after it.
    Without a scale: whether some scaler may have; what the graph has saved is then not read."""
    node = loss.grad_fn
    for _ in range(_STEPS_FROM_SCALE):
        if node is None or not node.name().startswith(("Mul", "Div", "Add", "Neg", "View")):
            return False
        if node.name() == "MulBackward0":
            if scale is None:
                return True
            other = saved_factor(node)
            if isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr():
                return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


class OuterScale(NamedTuple):
    """Scale and flag that a GradScaler that calls `step` gives for the gradients in `.grad`."""

    scale: Scalar
    found_inf: Scalar  # 0.0 if it checked no gradient


def outer_scale(op: str, proxy: object, scaler: GradScaler | None, accumulated: bool) -> OuterScale:
    """Return the scale and flag that the GradScaler that calls `step` has set on the optimizer.
    Raise if the optimizer has a scaler of its own, or has accumulated gradients that the calling
    one has not seen."""
    if scaler is not None:
        advice = "Leave scaler.step, update and unscale_ out, or scaler=None in the constructor"
        refuse_outer_scale(op, "an outer GradScaler beside its own", advice)
    if accumulated:
        refuse_outer_scale(op, "gradients taken in before the GradScaler could see them")
    scale, found_inf = vars(proxy)["grad_scale"], vars(proxy)["found_inf"]
    return OuterScale(
        1.0 if scale is None else to_host_if_free(scale),
        to_host_if_free(found_inf != 0) if on_device(found_inf) else 0.0,
    )


def refuse_outer_scale(op: str, got: str, advice: str | None = None) -> NoReturn:
    """Raise because a GradScaler calls `step`."""
    contract = "be called directly, not through scaler.step"
    own = f"Pass the scaler to the constructor: {OP}(..., scaler=scaler)"
    raise RuntimeError(message(op, "step", contract, got, advice or own))


def forget_scale(attributes: dict[str, Any]) -> None:
    """Remove what GradScaler sets on an optimizer for one step."""
    for name in ("grad_scale", "found_inf"):
        attributes.pop(name, None)
