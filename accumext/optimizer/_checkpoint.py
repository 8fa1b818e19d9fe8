"""An open window in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accumext.optimizer._ledger import Ledger
from accumext.optimizer._window import NO_WINDOW, Window
from accumext.tensors.checks import fail_type, fail_value, instance, type_name
from accumext.tensors.kinds import main_dtype
from accumext.tensors.scalars import as_tensor, on_device, to_host_if_free

_NUMBERS = {  # names in a checkpoint, and in a ledger
    "weight": "weight",
    "unit_weight": "base_weight",
    "unit_scale": "base_scale",
    "loss_scale": "loss_scale",
    "found_inf": "found_inf",
    "survivors": "counted",
}
_FLAGS = ("held_back", "through_backward")
_KEYS = {"main_grads", "micro_batches", *_FLAGS, "norm", *_NUMBERS}
_NEVER_NONE = ("weight", "unit_scale", "loss_scale")
_TENSORS = ("norm", "found_inf", "survivors")  # or None


def pack(window: Window, through_backward: bool) -> dict[str, Any]:
    """Return copies of everything in a window that is not in `.grad`, sums by parameter index; and
    whether its latest micro-batch came through `backward`, by which operators expect a sum."""
    numbers: dict[str, Any] = {k: getattr(window.ledger, name) for k, name in _NUMBERS.items()}
    numbers["norm"] = window.norm
    for name, nothing, dtype in (
        ("found_inf", 0.0, torch.float32),
        ("survivors", None, torch.float64),
    ):
        there = on_device(numbers[name]) or numbers[name] != nothing
        numbers[name] = as_tensor(numbers[name], dtype) if there else None
    sums = {i: main for i, main in enumerate(window.sums) if main is not None}
    return {
        "main_grads": {i: main.detach().clone() for i, main in sums.items()},
        "micro_batches": window.ledger.micro_batches,
        "held_back": window.unreduced,
        "through_backward": through_backward and bool(sums),
        **{k: v.detach().clone() if on_device(v) else v for k, v in numbers.items()},
    }


def unpack(op: str, packed: Any, parameters: Sequence[Tensor]) -> tuple[Window, bool]:
    """Return the checked window that `pack` copied, on the devices of the parameters; and whether
    its latest micro-batch came through `backward`, which version 0.1.0 did not save."""
    if not isinstance(packed, dict):
        fail_type(op, "state_dict", "be a dict", type_name(packed))
    packed = {"through_backward": False, **packed}
    if set(packed) != _KEYS:
        advice = "Pass what accumulation_state_dict() returned; state_dict() has no open window"
        keys = sorted(map(str, packed))
        fail_value(op, "state_dict", f"have the keys {sorted(_KEYS)}", keys, advice)
    count, held_back = packed["micro_batches"], packed["held_back"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        fail_value(op, "state_dict['micro_batches']", "be an int of at least 0", repr(count))
    for name in _FLAGS:
        if not isinstance(packed[name], bool):
            fail_type(op, f"state_dict[{name!r}]", "be a bool", type_name(packed[name]))
    sums = _unpacked_sums(op, packed["main_grads"], parameters)
    device = next((main.device for main in sums if main is not None), torch.device("cpu"))
    numbers = {f: _unpacked(op, name, packed[name], device) for name, f in _NUMBERS.items()}
    found, norm = numbers["found_inf"], _unpacked(op, "norm", packed["norm"], device)
    numbers["found_inf"] = 0.0 if found is None else to_host_if_free((found != 0).double())
    window = NO_WINDOW.of(parameters)
    ledger = Ledger(micro_batches=count, **numbers)
    window = window._replace(sums=sums, ledger=ledger, norm=norm, unreduced=held_back)
    return window, packed["through_backward"]


def _unpacked_sums(op: str, sums: Any, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the saved sum of each parameter, checked against it, or None."""
    if not isinstance(sums, dict):
        fail_type(op, "state_dict['main_grads']", "be a dict", type_name(sums))
    loaded: list[Tensor | None] = [None] * len(parameters)
    for index, main in sums.items():
        name = f"state_dict['main_grads'][{index!r}]"
        if not isinstance(index, int) or not 0 <= index < len(parameters):
            fail_value(op, name, f"be one of the {len(parameters)} parameters", f"index {index!r}")
        parameter = parameters[index]
        instance(op, name, main, Tensor, "be a tensor")
        if main.dtype not in (parameter.dtype, main_dtype(parameter)):
            fail_type(op, name, f"be a {main_dtype(parameter)} tensor", type_name(main))
        if main.shape != parameter.shape:
            fail_value(op, name, f"have shape {list(parameter.shape)}", list(main.shape))
        loaded[index] = main.detach().to(parameter.device, main_dtype(parameter), copy=True)
    return loaded


def _unpacked(op: str, name: str, value: Any, device: torch.device) -> Any:
    """Return a checked number as a window holds it: a float, or a tensor on the device."""
    entry, contract = f"state_dict[{name!r}]", "be a number, a 0-dim tensor or None"
    if value is None and name not in _NEVER_NONE:
        return None
    if on_device(value):
        if value.dim() != 0:
            fail_value(op, entry, contract, f"shape {list(value.shape)}")
    elif value is None:
        fail_type(op, entry, "be a number or a 0-dim tensor", "NoneType")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        fail_type(op, entry, contract, type_name(value))
    elif name in _TENSORS:
        fail_type(op, entry, "be a 0-dim tensor or None", "float")
    if name not in ("norm", "found_inf"):  # a sum of weights, a unit, a loss scale
        if not math.isfinite(number := float(value)):
            fail_value(op, entry, "be finite", number)
        if number < 0.0 or (number == 0.0 and name == "unit_weight"):
            bound = "be positive" if name == "unit_weight" else "be at least 0"
            fail_value(op, entry, bound, number)
    if not on_device(value):
        return float(value)
    value = value.detach().to(device, copy=True)
    return value if name in ("norm", "found_inf") else to_host_if_free(value)
