"""The settings of AccumulatingOptimizer, checked by one function."""

from __future__ import annotations

import inspect
import math
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from accumext.optimizer._accelerate import refuse_prepared
from accumext.optimizer._opacus import PER_SAMPLE, has_own_gradients
from accumext.tensors import checks, scalars
from accumext.tensors.kinds import Group, is_dtensor
from accumext.tensors.scalars import Scalar, on_device

OP = "AccumulatingOptimizer"


class Settings(NamedTuple):
    """The settings of one optimizer. Assigning one replaces the tuple."""

    window: int
    max_norm: float | None
    norm_type: float
    scaler: GradScaler | None
    on_nonfinite: checks.OnNonfinite
    reduction: checks.Reduction
    process_group: Group | None
    accumulate_in_backward: bool
    reduce_in_backward: bool
    synchronize: checks.Synchronize
    needs_closure: bool  # whether the wrapped `step` cannot be called without one
    names_closure: bool  # whether it takes one by name alone


# Arguments of which only the type is checked.
_GROUP = (NoneType, getattr(dist, "ProcessGroup", NoneType))  # not in every build of torch
_TYPES = (
    ("scaler", (NoneType, GradScaler), "be a torch.amp.GradScaler or None"),
    ("process_group", _GROUP, "be a torch.distributed process group or None"),
    ("accumulate_in_backward", bool, "be a bool"),
    ("reduce_in_backward", bool, "be a bool"),
)

# Values that other settings must have: if whole micro-batches are checked, or gradients are seen
# only when the window closes, and if a closure forms gradients that no window accumulates.
_LOOKS_FIRST = {"accumulate_in_backward": False, "reduce_in_backward": False}
_WITHOUT_WINDOW = {"window": 1, "max_norm": None, "scaler": None, "process_group": None}
_NEEDS_CLOSURE = {**_LOOKS_FIRST, **_WITHOUT_WINDOW, "synchronize": "backward"}


def check_settings(optimizer: Optimizer, **given: Any) -> Settings:
    """Return the checked settings of a wrapper around `optimizer`; raise for wrong ones."""
    for name, kinds, contract in _TYPES:
        if not isinstance(given[name], kinds):
            checks.fail_type(OP, name, contract, checks.type_name(given[name]))
    checks.one_of(OP, "on_nonfinite", given["on_nonfinite"], checks.ON_NONFINITE)
    checks.one_of(OP, "reduction", given["reduction"], checks.REDUCTIONS)
    checks.one_of(OP, "synchronize", given["synchronize"], checks.SYNCHRONIZE)
    given["window"] = checks.positive_int(OP, "window", given["window"])
    if given["max_norm"] is not None:
        given["max_norm"] = checks.number(OP, "max_norm", given["max_norm"])
        if given["max_norm"] <= 0.0:  # 0 is "off" in trainers; here it would make all gradients 0
            advice = "Pass None not to clip"
            checks.fail_value(OP, "max_norm", "be positive", given["max_norm"], advice)
    if checks.number(OP, "norm_type", given["norm_type"]) == 0.0:
        checks.fail_value(OP, "norm_type", "be nonzero", given["norm_type"])
    given["norm_type"] = float(given["norm_type"])
    if given["scaler"] is not None and not given["scaler"].is_enabled():
        given["scaler"] = None
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    settings = Settings(
        **given,
        needs_closure=needs_closure,
        names_closure=closure is not None and closure.kind is closure.KEYWORD_ONLY,
    )
    refuse_prepared(OP, optimizer)
    _refuse_conflicts(settings, optimizer)
    return settings


def _refuse_conflicts(settings: Settings, optimizer: Optimizer) -> None:
    """Raise for settings that conflict with each other, the optimizer or its parameters."""
    policy = settings.on_nonfinite
    looks_first = policy in ("skip_micro_batch", "raise")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    apart = any(map(is_dtensor, parameters)) or len({p.device for p in parameters}) > 1
    if policy == "skip_micro_batch" and apart:  # one device must have all gradients to drop them
        contract = (
            "be 'skip_window', 'raise' or 'step' if parameters are sharded or on several devices"
        )
        checks.fail_value(OP, "on_nonfinite", contract, repr(policy))
    looks = f"on_nonfinite={policy!r}, which looks at whole micro-batches first"
    once, window = settings.synchronize == "window", "synchronize='window'"
    closure = f"{type(optimizer).__name__}, which needs a closure"
    for applies, needed, reason, advice in (
        (looks_first, _LOOKS_FIRST, looks, None),
        (once and looks_first, {"on_nonfinite": "skip_window"}, window, None),
        (once, _LOOKS_FIRST, window, None),
        (settings.needs_closure, _NEEDS_CLOSURE, closure, None),
        (has_own_gradients(optimizer), _WITHOUT_WINDOW, *PER_SAMPLE),
    ):
        for name, only in needed.items() if applies else ():
            value = getattr(settings, name)
            if value != only:
                got = checks.type_name(value) if only is None else repr(value)
                checks.fail_value(OP, name, f"be {only!r} for {reason}", got, advice)


def unlike_bare(settings: Settings) -> dict[str, Any]:
    """Return the settings that make a step do more than that of the bare optimizer."""
    given = {name: getattr(settings, name) for name in _WITHOUT_WINDOW}
    return {name: value for name, value in given.items() if value != _WITHOUT_WINDOW[name]}


def check_weight(op: str, weight: object) -> Scalar:
    """Return a finite number of at least 0; or a 0-dim tensor on a device, unread, in float64."""
    if on_device(weight):
        if weight.dim() != 0:
            contract = "be a number or a 0-dim tensor"
            checks.fail_value(op, "weight", contract, f"shape {list(weight.shape)}")
        if weight.dtype == torch.bool or weight.is_complex():
            checks.fail_type(op, "weight", "be a real number", checks.type_name(weight))
        if weight.requires_grad:  # most likely a loss
            advice = "Pass weight.detach(), or a loss as opt.backward(loss)"
            checks.fail_value(op, "weight", "be without a graph", "one with", advice)
        if not scalars.on_host(weight):
            return weight.detach().double()
        weight = weight.item()
    value = checks.number(op, "weight", weight, 0.0)
    if math.isinf(value):
        checks.fail_value(op, "weight", "be finite", value)
    return value
