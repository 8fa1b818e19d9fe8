"""The contracts of the gradient operations: checks of their arguments, and who may share memory.

The function of an operation takes its arguments, raises its errors and returns its tensors by name.
Bools are checked elsewhere, and memory by `check` alone: tensors with which torch.compile traces
have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accumext.tensors import memory_overlap
from accumext.tensors.checks import FLOAT_DTYPES, fail_type, fail_value, message, number, type_name

Tensors: TypeAlias = dict[str, Tensor]  # by name, such as `grads[3]`


def accumulate_(
    main_grads: Any,
    grads: Any,
    *,
    inv_scale: Any = 1.0,
    found_inf: Any = None,
    overwrite: bool = False,
) -> Tensors:
    """Check arguments of `accumext.accumulate_`."""
    op = "accumulate_"
    tensors = _pairs(op, main_grads, grads)
    return _on_one_device(op, tensors | _scalars(op, "inv_scale", inv_scale, found_inf))


def unscale_check_clip_accumulate_(
    main_grads: Any,
    grads: Any,
    *,
    inv_scale: Any = 1.0,
    max_norm: Any,
    norm_type: Any = 2.0,
    found_inf: Any = None,
    overwrite: bool = False,
    if_finite: bool = False,
) -> Tensors:
    """Check arguments of `accumext.unscale_check_clip_accumulate_`."""
    op = "unscale_check_clip_accumulate_"
    tensors = _pairs(op, main_grads, grads)
    tensors = _on_one_device(op, tensors | _scalars(op, "inv_scale", inv_scale, found_inf))
    number(op, "max_norm", max_norm, low=0.0)
    _check_norm_type(op, norm_type)
    return tensors


def total_norm(
    grads: Any, *, norm_type: Any = 2.0, inv_scale: Any = 1.0, found_inf: Any = None
) -> Tensors:
    """Check arguments of `accumext.total_norm`."""
    op = "total_norm"
    tensors = _dense_floats(op, "grads", grads)
    tensors = _on_one_device(op, tensors | _scalars(op, "inv_scale", inv_scale, found_inf))
    _check_norm_type(op, norm_type)
    return tensors


def scale_(grads: Any, factor: Any) -> Tensors:
    """Check arguments of `accumext.scale_`."""
    op = "scale_"
    tensors = _dense_floats(op, "grads", grads, written=True)
    return _on_one_device(op, tensors | _scalars(op, "factor", factor, None))


def copy_rounded_(
    targets: Any, sources: Any, *, seed: Any = None, found_inf: Any = None
) -> Tensors:
    """Check arguments of `accumext.copy_rounded_`."""
    op = "copy_rounded_"
    tensors = _pairs(op, targets, sources, ("targets", "sources"), "target")
    return _on_one_device(op, tensors | _seed(op, seed) | _flag(op, found_inf))


_PAIR_WRITTEN = ("main_grads", "found_inf")
# The arguments that are written, and those that may share memory with no other: scale_ multiplies
# memory as often as it is named.
_WRITTEN: dict[Callable[..., Tensors], tuple[tuple[str, ...], tuple[str, ...]]] = {
    accumulate_: (_PAIR_WRITTEN, _PAIR_WRITTEN),
    unscale_check_clip_accumulate_: (_PAIR_WRITTEN, _PAIR_WRITTEN),
    total_norm: (("found_inf",), ("found_inf",)),
    scale_: (("grads",), ("factor",)),
    copy_rounded_: (("targets",), ("targets",)),
}
# Lists that are written, and read, whose entries of the same index may be the same tensor.
_IN_PLACE = {("main_grads", "grads"), ("targets", "sources")}


def check(contract: Callable[..., Tensors], *args: Any, **options: Any) -> Tensors:
    """Check all arguments of an operation, and that written memory is not shared, unless a written
    tensor and the one that is read for it are the same."""
    op, tensors = contract.__name__, contract(*args, **options)
    names, (_, apart) = list(tensors), _WRITTEN[contract]
    written = [name.startswith(apart) for name in names]
    shared = memory_overlap.sharing_pairs(list(tensors.values()), written) if any(written) else ()
    for i, j in sorted(shared, key=lambda pair: (pair[1], pair[0])):
        first, name = names[i], names[j]
        wanted = f"share no memory with {first}"
        (writes, _, number), (reads, _, other_number) = first.partition("["), name.partition("[")
        if number == other_number and (writes, reads) in _IN_PLACE:
            if memory_overlap.is_same(tensors[first], tensors[name]):
                continue
            wanted = f"be {first} or share no memory with it"
        advice = f"Give it memory of its own: {name}.clone()"
        fail_value(op, name, wanted, "some of its elements", advice)
    return tensors


def explain(
    error: Exception, contract: Callable[..., Tensors], *args: Any, **options: Any
) -> Exception:
    """Return the exception of a failed call: that of the first check that fails, else `error`."""
    try:
        tensors = check(contract, *args, **options)
        if not torch.is_inference_mode_enabled():
            written, _ = _WRITTEN[contract]
            for name in filter(lambda name: name.startswith(written), tensors):
                _check_writable(contract.__name__, name, tensors[name])
    except (ValueError, TypeError, RuntimeError) as sentence:
        return sentence
    return error


def _check_writable(op: str, name: str, tensor: Tensor) -> None:
    """Raise for an inference tensor: autograd could not see the write."""
    if tensor.is_inference():
        contract = "not be an inference tensor outside of inference mode"
        advice = (
            "Inplace update to inference tensor outside InferenceMode is not allowed: "
            f"{name}.clone() is a normal tensor"
        )
        raise RuntimeError(message(op, name, contract, "one", advice))


def _dense_floats(op: str, argument: str, tensors: Any, written: bool = False) -> Tensors:
    """Return a list's tensors by name; raise unless they are dense and of floating point."""
    if not isinstance(tensors, (list, tuple)):
        fail_type(op, argument, "be a list of tensors", type_name(tensors))
    named = {f"{argument}[{i}]": tensor for i, tensor in enumerate(tensors)}
    for name, tensor in named.items():
        dense_float(op, name, tensor, written)
    return named


def dense_float(op: str, name: str, tensor: Any, written: bool) -> None:
    """Raise unless a tensor is dense, of floating point and, if written, without overlap."""
    contract = "be a dense float16, bfloat16, float32 or float64 tensor"
    if not isinstance(tensor, Tensor):
        fail_type(op, name, contract, type_name(tensor))
    if tensor.is_nested:
        fail_type(op, name, contract, "a nested tensor")
    if tensor.layout != torch.strided:
        fail_type(op, name, contract, f"a {str(tensor.layout).removeprefix('torch.')} tensor")
    if tensor.dtype not in FLOAT_DTYPES:
        fail_type(op, name, contract, type_name(tensor))
    if written and memory_overlap.overlaps_itself(tensor):
        got = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        advice = f"Give it memory of its own: {name}.contiguous()"
        fail_value(op, name, "not overlap itself in memory", got, advice)


def _pairs(
    op: str,
    written: Any,
    read: Any,
    names: tuple[str, str] = ("main_grads", "grads"),
    entry: str = "main gradient",  # the word for an entry of `written` in an error
) -> Tensors:
    """Return tensors to write and to read by name; raise unless they pair with equal shapes."""
    mains = _dense_floats(op, names[0], written, written=True)
    incoming = _dense_floats(op, names[1], read)
    if len(mains) != len(incoming):
        entries = f"have one entry per {entry}, {len(mains)}"
        fail_value(op, names[1], entries, len(incoming))
    for main_name, name in zip(mains, incoming, strict=True):
        shape, got = list(mains[main_name].shape), list(incoming[name].shape)
        if got != shape:
            fail_value(op, name, f"have the shape of {main_name}, {shape}", got)
    return mains | incoming


def _scalars(op: str, argument: str, factor: Any, found_inf: Any) -> Tensors:
    """Check a factor (number or 0-dim tensor) and found_inf; return tensors among them by name."""
    scalars: Tensors = {}
    if isinstance(factor, Tensor):
        if factor.layout != torch.strided or factor.dtype not in FLOAT_DTYPES:
            fail_type(op, argument, "be a float or a 0-dim float tensor", type_name(factor))
        scalars = _zero_dim(op, argument, factor)
    else:
        number(op, argument, factor)
    scalars |= _flag(op, found_inf)
    if found_inf is not None and found_inf.is_neg():
        advice = "Give it memory of its own: found_inf.resolve_neg()"
        fail_value(op, "found_inf", "not be a negated view", "one", advice)
    return scalars


def _flag(op: str, found_inf: Any) -> Tensors:
    """Return found_inf by name; raise unless it is a 0-dim float32 tensor or None."""
    if found_inf is None:
        return {}
    if not isinstance(found_inf, Tensor) or found_inf.dtype != torch.float32:
        fail_type(op, "found_inf", "be a 0-dim float32 tensor", type_name(found_inf))
    return _zero_dim(op, "found_inf", found_inf)


def _seed(op: str, seed: Any) -> Tensors:
    """Return a seed by name; raise unless it is a 0-dim int64 tensor or None."""
    if seed is None:
        return {}
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        advice = "On the device of the lists: torch.tensor(0, device=...)"
        fail_type(op, "seed", "be a 0-dim int64 tensor", type_name(seed), advice)
    return _zero_dim(op, "seed", seed)


def _zero_dim(op: str, argument: str, tensor: Tensor) -> Tensors:
    if tensor.dim() != 0:
        fail_value(op, argument, "be 0-dim", f"shape {list(tensor.shape)}")
    return {argument: tensor}


def _on_one_device(op: str, tensors: Tensors) -> Tensors:
    """Return tensors; raise unless every one is on the device of the first."""
    first_name, first = next(iter(tensors.items()), ("", None))
    for name, tensor in tensors.items():
        if first is not None and tensor.device != first.device:
            device = f"be on the device of {first_name}, {first.device}"
            fail_value(op, name, device, tensor.device)
    return tensors


def _check_norm_type(op: str, norm_type: Any) -> None:
    if number(op, "norm_type", norm_type) == 0:
        fail_value(op, "norm_type", "be nonzero", norm_type)
