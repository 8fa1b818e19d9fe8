"""What the arguments of AccumulatingOptimizer must be."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from accumext import _checks, _scalars
from accumext._scalars import Scalar
from accumext._tensor_kinds import Group, is_dtensor
from accumext.optimizer._distributed import check_group, packed_group, unpacked_group

OP = "AccumulatingOptimizer"
UNWEIGHTED: Final = 1.0  # the default weight: this object, which needs no check


@dataclass
class Settings:
    """The arguments of one optimizer; they may be changed between windows."""

    window: int
    max_norm: float | None
    norm_type: float
    scaler: GradScaler | None
    on_nonfinite: _checks.OnNonfinite
    reduction: _checks.Reduction
    process_group: Group | None
    accumulate_in_backward: bool
    reduce_in_backward: bool
    synchronize: _checks.Synchronize
    needs_closure: bool  # whether the wrapped `step` cannot be called without one

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "process_group": packed_group(OP, self.process_group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, process_group=unpacked_group(state["process_group"]))


def check_arguments(optimizer: Optimizer, **arguments: Any) -> Settings:
    """The settings of an optimizer around `optimizer`, or the error that says what is wrong."""
    settings = Settings(**arguments, needs_closure=_needs_closure(optimizer))
    if not (settings.scaler is None or isinstance(settings.scaler, GradScaler)):
        contract = "be a torch.amp.GradScaler or None"
        _checks.fail_type(OP, "scaler", contract, _checks.type_name(settings.scaler))
    if settings.scaler is not None and not settings.scaler.is_enabled():
        settings.scaler = None
    settings.window = _checks.positive_int(OP, "window", settings.window)
    if settings.max_norm is not None:
        settings.max_norm = _checks.number(OP, "max_norm", settings.max_norm, 0.0)
    settings.norm_type = _checks.number(OP, "norm_type", settings.norm_type)
    if settings.norm_type == 0.0:
        _checks.fail_value(OP, "norm_type", "be nonzero", arguments["norm_type"])
    _checks.one_of(OP, "on_nonfinite", settings.on_nonfinite, _checks.ON_NONFINITE)
    _check_policy(settings.on_nonfinite, optimizer)
    _checks.one_of(OP, "reduction", settings.reduction, _checks.REDUCTIONS)
    check_group(OP, settings.process_group)
    for name in ("accumulate_in_backward", "reduce_in_backward"):
        _check_in_backward(name, arguments[name], settings.on_nonfinite)
    _checks.one_of(OP, "synchronize", settings.synchronize, _checks.SYNCHRONIZE)
    if settings.synchronize == "window":
        _check_once_per_window(settings)
    if settings.needs_closure:
        _check_closure_optimizer(type(optimizer).__name__, settings)
    return settings


def check_loss_and_weight(op: str, loss: object, weight: object) -> Scalar:
    """The loss must be 0-dim and have a graph; returns the weight as `check_weight` does."""
    if not isinstance(loss, Tensor):
        _checks.fail_type(op, "loss", "be a tensor", _checks.type_name(loss))
    if loss.dim() != 0:
        _checks.fail_value(op, "loss", "be 0-dim", f"shape {list(loss.shape)}")
    if not loss.requires_grad:
        advice = "Compute it from the parameters with gradients enabled"
        _checks.fail_value(op, "loss", "have a graph", "a tensor without one", advice)
    return weight if weight is UNWEIGHTED else check_weight(op, weight)


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


def _check_policy(policy: str, optimizer: Optimizer) -> None:
    """A bad micro-batch is dropped where its gradients are, so they must be in one place."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    apart = any(map(is_dtensor, parameters)) or len({p.device for p in parameters}) > 1
    if policy == "skip_micro_batch" and apart:
        contract = "be 'skip_window' or 'raise' where parameters are sharded or on several devices"
        _checks.fail_value(OP, "on_nonfinite", contract, repr(policy))


def _check_in_backward(name: str, value: object, policy: str) -> None:
    """A bool; True only where gradients may be added before the whole micro-batch is known."""
    if not isinstance(value, bool):
        _checks.fail_type(OP, name, "be a bool", _checks.type_name(value))
    if value and policy != "skip_window":
        contract = f"be False for on_nonfinite={policy!r}, which looks at whole micro-batches first"
        _checks.fail_value(OP, name, contract, value)


def _check_once_per_window(settings: Settings) -> None:
    """Gradients are seen only when the window is closed."""
    for name, only in (
        ("on_nonfinite", "skip_window"),
        ("accumulate_in_backward", False),
        ("reduce_in_backward", False),
    ):
        value = getattr(settings, name)
        if value != only:
            _checks.fail_value(OP, name, f"be {only!r} for synchronize='window'", repr(value))


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
        ("synchronize", "backward"),
    ):
        value = getattr(settings, name)
        if value != only:
            got = _checks.type_name(value) if only is None else value
            _checks.fail_value(OP, name, f"be {only} for {kind}, which needs a closure", got)
