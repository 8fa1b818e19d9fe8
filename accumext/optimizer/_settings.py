"""What AccumulatingOptimizer was told: its settings, checked by one function."""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from accumext import _checks, _scalars
from accumext._scalars import Scalar
from accumext._tensor_kinds import Group, is_dtensor

OP = "AccumulatingOptimizer"


class Settings(NamedTuple):
    """The arguments of one optimizer; assigning one of them makes another of these."""

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
    looks_first: bool  # whether a micro-batch is kept apart until it is known to be finite


def check_settings(optimizer: Optimizer, **arguments: Any) -> Settings:
    """The settings of an optimizer around `optimizer`, or the error that says what is wrong."""
    looks_first = arguments["on_nonfinite"] != "skip_window"
    needs_closure = _needs_closure(optimizer)
    settings = Settings(**arguments, needs_closure=needs_closure, looks_first=looks_first)
    scaler, max_norm = settings.scaler, settings.max_norm
    if not (scaler is None or isinstance(scaler, GradScaler)):
        contract = "be a torch.amp.GradScaler or None"
        _checks.fail_type(OP, "scaler", contract, _checks.type_name(scaler))
    if max_norm is not None:
        max_norm = _checks.number(OP, "max_norm", max_norm, 0.0)
    settings = settings._replace(
        scaler=scaler if scaler is not None and scaler.is_enabled() else None,
        window=_checks.positive_int(OP, "window", settings.window),
        max_norm=max_norm,
        norm_type=_checks.number(OP, "norm_type", settings.norm_type),
    )
    if settings.norm_type == 0.0:
        _checks.fail_value(OP, "norm_type", "be nonzero", arguments["norm_type"])
    _checks.one_of(OP, "on_nonfinite", settings.on_nonfinite, _checks.ON_NONFINITE)
    _check_policy(settings.on_nonfinite, optimizer)
    _checks.one_of(OP, "reduction", settings.reduction, _checks.REDUCTIONS)
    _check_group(settings.process_group)
    for name in ("accumulate_in_backward", "reduce_in_backward"):
        _check_in_backward(name, arguments[name], settings.on_nonfinite)
    _checks.one_of(OP, "synchronize", settings.synchronize, _checks.SYNCHRONIZE)
    if settings.synchronize == "window":
        _check_once_per_window(settings)
    if settings.needs_closure:
        _check_closure_optimizer(type(optimizer).__name__, settings)
    return settings


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


def packed_group(settings: Settings) -> Settings:
    """With the group as a pickle or copy can hold it: the default one, or none."""
    group: Any = settings.process_group
    if group is None:
        return settings
    if group is not dist.group.WORLD:
        contract = "be the default group to be copied or pickled"
        raise RuntimeError(_checks.message(OP, "process_group", contract, "another"))
    default: Any = "default"
    return settings._replace(process_group=default)


def unpacked_group(settings: Settings) -> Settings:
    """With the group of the process that unpickles."""
    if settings.process_group is None:
        return settings
    return settings._replace(process_group=dist.group.WORLD)


def _check_group(group: object) -> None:
    """A process group, or None."""
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        got = _checks.type_name(group)
        contract = "be a torch.distributed process group or None"
        _checks.fail_type(OP, "process_group", contract, got)


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
