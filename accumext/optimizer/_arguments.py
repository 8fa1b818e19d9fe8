"""What the arguments of AccumulatingOptimizer must be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext import _checks
from accumext._scalars import Scalar, on_host
from accumext._tensor_kinds import is_dtensor

OP = "AccumulatingOptimizer"

_STEPS_FROM_SCALE = (
    4  # operations after scaler.scale that are looked through: `scaler.scale(l) / n`
)

UNWEIGHTED = 1.0  # the default weight; this very object tells that none was given


def check_loss(op: str, loss: object, scale: Tensor | None) -> None:
    """A 0-dim tensor with a graph, that was not multiplied with the loss scale already."""
    if not isinstance(loss, Tensor):
        _checks.fail_type(op, "loss", "be a tensor", _checks.type_name(loss))
    if loss.dim() != 0:
        _checks.fail_value(op, "loss", "be 0-dim", f"shape {list(loss.shape)}")
    if not loss.requires_grad:
        advice = "Compute it from the parameters with gradients enabled"
        _checks.fail_value(op, "loss", "have a graph", "a tensor without one", advice)
    if scale is not None and _is_scaled_with(loss, scale):
        contract = "be unscaled where the optimizer was given the scaler, which it scales with"
        advice = "Pass the loss itself: opt.backward(loss)"
        _checks.fail_value(op, "loss", contract, "scaler.scale(loss)", advice)


def _is_scaled_with(loss: Tensor, scale: Tensor) -> bool:
    """Whether `scaler.scale` made this loss, perhaps with a division or the like after it."""
    node = loss.grad_fn
    for _ in range(_STEPS_FROM_SCALE):
        if node is None or not node.name().startswith(("Mul", "Div", "Add", "Neg", "View")):
            return False
        other = getattr(node, "_saved_other", None) if node.name() == "MulBackward0" else None
        if isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr():
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def check_weight(op: str, weight: object) -> Scalar:
    """A finite number of at least 0; a 0-dim tensor on a device stays there, in float64."""
    if isinstance(weight, Tensor):
        if weight.dim() != 0:
            contract = "be a number or a 0-dim tensor"
            _checks.fail_value(op, "weight", contract, f"shape {list(weight.shape)}")
        if weight.dtype == torch.bool or weight.is_complex():
            _checks.fail_type(op, "weight", "be a real number", _checks.type_name(weight))
        if not on_host(weight):
            return weight.detach().double()
        weight = weight.item()
    value = _checks.number(op, "weight", weight, 0.0)
    if math.isinf(value):
        _checks.fail_value(op, "weight", "be finite", value)
    return value


def check_policy(policy: str, parameters: Sequence[Tensor]) -> None:
    """A bad micro-batch is dropped where its gradients are, so they must be in one place."""
    apart = any(map(is_dtensor, parameters)) or len({p.device for p in parameters}) > 1
    if policy == "skip_micro_batch" and apart:
        contract = "be 'skip_window' or 'raise' where parameters are sharded or on several devices"
        _checks.fail_value(OP, "on_nonfinite", contract, repr(policy))


def check_in_backward(name: str, value: object, policy: str) -> bool:
    """A bool; True only where a micro-batch need not be complete before it is taken in."""
    if not isinstance(value, bool):
        _checks.fail_type(OP, name, "be a bool", _checks.type_name(value))
    if value and policy != "skip_window":
        contract = f"be False for on_nonfinite={policy!r}, which looks at whole micro-batches first"
        _checks.fail_value(OP, name, contract, value)
    return value


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot be called without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_closure_optimizer(
    optimizer: Optimizer,
    window: int,
    max_norm: object,
    scaler: object,
    process_group: object,
    **in_backward: bool,
) -> None:
    """What evaluates a closure forms its own gradients, beyond the reach of a window."""
    kind = type(optimizer).__name__
    for name, asked in in_backward.items():
        if asked:
            contract = f"be False for {kind}, which needs a closure"
            _checks.fail_value(OP, name, contract, asked)
    if window != 1:
        _checks.fail_value(OP, "window", f"be 1 for {kind}, which needs a closure", window)
    others = {"max_norm": max_norm, "scaler": scaler, "process_group": process_group}
    for name, value in others.items():
        if value is not None:
            contract = f"be None for {kind}, which needs a closure"
            _checks.fail_value(OP, name, contract, _checks.type_name(value))
