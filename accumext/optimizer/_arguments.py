"""What the arguments of AccumulatingOptimizer must be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from accumext import _checks, _scalars
from accumext._scalars import Scalar
from accumext._tensor_kinds import Group, is_dtensor
from accumext.optimizer._distributed import check_group

OP = "AccumulatingOptimizer"
UNWEIGHTED = 1.0  # the default weight; identity with this object tells that none was given

# Operations after scaler.scale that are looked through, as in `scaler.scale(loss) / n`.
_STEPS_FROM_SCALE = 4


@dataclass
class Settings:
    """The arguments of one optimizer, checked; they may be changed between windows."""

    window: int
    max_norm: float | None
    norm_type: float
    scaler: GradScaler | None  # None also where it is disabled
    on_nonfinite: str
    reduction: str
    process_group: Group | None
    accumulate_in_backward: bool
    reduce_in_backward: bool
    needs_closure: bool  # whether the wrapped `step` cannot be called without one


def check_arguments(
    optimizer: Optimizer,
    window: int,
    max_norm: float | None,
    norm_type: float,
    scaler: GradScaler | None,
    on_nonfinite: str,
    reduction: str,
    process_group: Group | None,
    accumulate_in_backward: bool,
    reduce_in_backward: bool,
) -> Settings:
    """The settings of an optimizer around `optimizer`, or the error that says what is wrong."""
    if not (scaler is None or isinstance(scaler, GradScaler)):
        contract = "be a torch.amp.GradScaler or None"
        _checks.fail_type(OP, "scaler", contract, _checks.type_name(scaler))
    policies = ("skip_window", "skip_micro_batch", "raise")
    settings = Settings(
        window=_checks.positive_int(OP, "window", window),
        max_norm=None if max_norm is None else _checks.number(OP, "max_norm", max_norm, 0.0),
        norm_type=_checks.number(OP, "norm_type", norm_type),
        scaler=scaler if scaler is not None and scaler.is_enabled() else None,
        on_nonfinite=_checks.one_of(OP, "on_nonfinite", on_nonfinite, policies),
        reduction=_checks.one_of(OP, "reduction", reduction, ("mean", "sum")),
        process_group=check_group(OP, process_group),
        accumulate_in_backward=_check_in_backward(
            "accumulate_in_backward", accumulate_in_backward, on_nonfinite
        ),
        reduce_in_backward=_check_in_backward(
            "reduce_in_backward", reduce_in_backward, on_nonfinite
        ),
        needs_closure=_needs_closure(optimizer),
    )
    if settings.norm_type == 0.0:
        _checks.fail_value(OP, "norm_type", "be nonzero", norm_type)
    _check_policy(on_nonfinite, [p for group in optimizer.param_groups for p in group["params"]])
    if settings.needs_closure:
        _check_closure_optimizer(type(optimizer).__name__, settings)
    return settings


def check_loss(op: str, loss: object, scale: Tensor | None) -> None:
    """A 0-dim tensor with a graph, not multiplied with the loss scale already."""
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


def check_weight(op: str, weight: object) -> Scalar:
    """A finite number of at least 0; a 0-dim tensor on a device stays there, in float64."""
    if isinstance(weight, Tensor):
        if weight.dim() != 0:
            contract = "be a number or a 0-dim tensor"
            _checks.fail_value(op, "weight", contract, f"shape {list(weight.shape)}")
        if weight.dtype == torch.bool or weight.is_complex():
            _checks.fail_type(op, "weight", "be a real number", _checks.type_name(weight))
        if not _scalars.on_host(weight):
            return weight.detach().double()
        weight = weight.item()
    value = _checks.number(op, "weight", weight, 0.0)
    if math.isinf(value):
        _checks.fail_value(op, "weight", "be finite", value)
    return value


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


def _check_policy(policy: str, parameters: Sequence[Tensor]) -> None:
    """A bad micro-batch is dropped where its gradients are, so they must be in one place."""
    apart = any(map(is_dtensor, parameters)) or len({p.device for p in parameters}) > 1
    if policy == "skip_micro_batch" and apart:
        contract = "be 'skip_window' or 'raise' where parameters are sharded or on several devices"
        _checks.fail_value(OP, "on_nonfinite", contract, repr(policy))


def _check_in_backward(name: str, value: object, policy: str) -> bool:
    """A bool; True only where a micro-batch may be taken in before all of it is known."""
    if not isinstance(value, bool):
        _checks.fail_type(OP, name, "be a bool", _checks.type_name(value))
    if value and policy != "skip_window":
        contract = f"be False for on_nonfinite={policy!r}, which looks at whole micro-batches first"
        _checks.fail_value(OP, name, contract, value)
    return value


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot be called without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_closure_optimizer(kind: str, settings: Settings) -> None:
    """What evaluates a closure forms its own gradients, which no window can accumulate."""
    for name, only in (
        ("accumulate_in_backward", False),
        ("reduce_in_backward", False),
        ("window", 1),
        ("max_norm", None),
        ("scaler", None),
        ("process_group", None),
    ):
        value = getattr(settings, name)
        if value != only:
            got = _checks.type_name(value) if only is None else value
            _checks.fail_value(OP, name, f"be {only} for {kind}, which needs a closure", got)
