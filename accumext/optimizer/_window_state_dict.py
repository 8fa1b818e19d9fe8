"""An open window as plain tensors and numbers, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accumext._checks import fail_type, fail_value, type_name
from accumext._scalars import any_set, as_tensor, to_host_if_free
from accumext._tensor_kinds import main_dtype
from accumext.optimizer._loss_scaling import LossScale
from accumext.optimizer._window import Window

# Names of Window's fields in a state dict, which stay as they are in saved files.
_SCALARS = ("weight", "unit_weight", "unit_scale", "loss_scale", "norm", "found_inf", "survivors")
_KEYS = {"main_grads", "micro_batches", "held_back", *_SCALARS}


def pack(window: Window, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Copies of everything that the window holds, main gradients by parameter index."""
    window = window.detached_copy()
    finite = window.finite_micro_batches
    flags = window.found_infs.values()
    values = {
        "weight": window.weight,
        "unit_weight": window.unit_weight,
        "unit_scale": window.unit_scale.value,
        "loss_scale": window.loss_scale,
        "norm": window.norm,
        "found_inf": as_tensor(any_set(flags), torch.float32) if flags else None,
        "survivors": None if finite is None else as_tensor(finite, torch.float64),
    }
    by_parameter = window.by_parameter
    main_grads = {i: by_parameter[p] for i, p in enumerate(parameters) if p in by_parameter}
    return {
        "main_grads": {i: main.detach().clone() for i, main in main_grads.items()},
        "micro_batches": window.micro_batches,
        "held_back": window.held_back,
        **{k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in values.items()},
    }


def unpack(op: str, packed: Any, parameters: Sequence[Tensor]) -> Window:
    """The window that `pack` saw, on the devices of the parameters."""
    if not isinstance(packed, dict):
        fail_type(op, "state_dict", "be a dict", type_name(packed))
    if set(packed) != _KEYS:
        fail_value(op, "state_dict", f"have the keys {sorted(_KEYS)}", sorted(map(str, packed)))
    count = packed["micro_batches"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        fail_value(op, "state_dict['micro_batches']", "be an int of at least 0", repr(count))
    held_back = packed["held_back"]
    if not isinstance(held_back, bool):
        fail_type(op, "state_dict['held_back']", "be a bool", type_name(held_back))
    window = Window()
    window.micro_batches, window.held_back = count, held_back
    window.replace(_main_grads(op, packed["main_grads"], parameters))
    window.in_order = False  # as far as is known
    device = next((main.device for main in window.main_grads.tensors), torch.device("cpu"))
    scalars = {name: _scalar(op, name, packed[name], device) for name in _SCALARS}
    for name in ("weight", "unit_scale", "loss_scale"):
        if scalars[name] is None:
            fail_type(op, f"state_dict[{name!r}]", "be a number or a 0-dim tensor", "NoneType")
    for name in ("norm", "found_inf", "survivors"):
        if isinstance(scalars[name], float):
            fail_type(op, f"state_dict[{name!r}]", "be a 0-dim tensor or None", "float")
    window.norm, found_inf = scalars.pop("norm"), scalars.pop("found_inf")
    if found_inf is not None:
        window.note_found_inf(found_inf)
    numbers = {k: to_host_if_free(v) if isinstance(v, Tensor) else v for k, v in scalars.items()}
    window.weight, window.unit_weight = numbers["weight"], numbers["unit_weight"]
    window.unit_scale, window.loss_scale = LossScale(numbers["unit_scale"]), numbers["loss_scale"]
    window.finite_micro_batches = numbers["survivors"]
    return window


def _main_grads(op: str, main_grads: Any, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Main gradients by parameter, checked against it."""
    if not isinstance(main_grads, dict):
        fail_type(op, "state_dict['main_grads']", "be a dict", type_name(main_grads))
    loaded: dict[Tensor, Tensor] = {}
    for index, main in main_grads.items():
        name = f"state_dict['main_grads'][{index!r}]"
        if not isinstance(index, int) or not 0 <= index < len(parameters):
            fail_value(op, name, f"be one of the {len(parameters)} parameters", f"index {index!r}")
        parameter = parameters[index]
        if not isinstance(main, Tensor):
            fail_type(op, name, "be a tensor", type_name(main))
        if main.dtype not in (parameter.dtype, main_dtype(parameter)):
            fail_type(op, name, f"be a {main_dtype(parameter)} tensor", type_name(main))
        if main.shape != parameter.shape:
            fail_value(op, name, f"have shape {list(parameter.shape)}", list(main.shape))
        loaded[parameter] = main.detach().to(parameter.device, main_dtype(parameter), copy=True)
    return loaded


def _scalar(op: str, name: str, value: Any, device: torch.device) -> Any:
    """A finite number, a 0-dim tensor (moved to the device) or None."""
    contract = "be a number, a 0-dim tensor or None"
    if isinstance(value, Tensor):
        if value.dim() != 0:
            fail_value(op, f"state_dict[{name!r}]", contract, f"shape {list(value.shape)}")
        if name not in ("norm", "found_inf"):
            _check_range(op, name, float(value))
        return value.detach().to(device, copy=True)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail_type(op, f"state_dict[{name!r}]", contract, type_name(value))
    _check_range(op, name, value)
    return float(value)


def _check_range(op: str, name: str, value: float) -> None:
    """What a sum of weights, a unit or a loss scale can be."""
    if not math.isfinite(value):
        fail_value(op, f"state_dict[{name!r}]", "be finite", value)
    if value < 0.0 or (value == 0.0 and name == "unit_weight"):
        bound = "be positive" if name == "unit_weight" else "be at least 0"
        fail_value(op, f"state_dict[{name!r}]", bound, value)
