"""The gradient operations: of each the schema, the default kernel and the public function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from accumext.ops import _contracts, reference
from accumext.tensors.checks import bools
from accumext.tensors.torch_private import (
    call_of_operator,
    negated_view,
    set_grad_enabled,
    write_count,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ops = torch.ops.accumext


def _define(
    name: str,
    schema: str,  # with {factor} in place of the 0-dim tensor or float
    normed: int | None = None,  # the number of the list whose norm is returned
    factors: tuple[str, str] = ("Tensor? inv_scale=None", "float inv_scale"),
) -> None:
    """Define two overloads, for a tensor and for a float; the tensor's comes first in resolution.

    If the float's were the only one, or the first, it would take a tensor too, by reading it from
    the device.
    """
    for overload, factor in zip(("", ".scalar"), factors, strict=True):
        _define_overload(name, overload, schema.format(factor=factor), normed)


def _define_overload(name: str, overload: str, schema: str, normed: int | None = None) -> None:
    """Define an operator that checks its contract, also if it computes nothing but shapes."""
    contract = getattr(_contracts, name)

    def fake(*args: Any, **options: Any) -> Tensor | None:
        contract(*args, **options)
        if normed is None:
            return None
        tensors = args[normed]
        device = tensors[0].device if tensors else None
        return torch.empty((), dtype=reference.accumulation_dtype(*tensors), device=device)

    _register(f"accumext::{name}{overload}", schema, getattr(reference, name), fake)


def _register(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    torch.library.define(name, schema)
    torch.library.impl(name, "default", kernel)
    torch.library.register_fake(name, fake)


def _without_graph(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Do as `torch.no_grad()`, which takes as long as an operation on ten tensors."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            set_grad_enabled(True)

    return call


def _mark_written(tensors: Sequence[Tensor], found_inf: Tensor | None = None) -> None:
    """Tell autograd of writes by compiled kernels, so that it can refuse changed saved tensors."""
    if tensors:
        torch.autograd.graph.increment_version(tensors)
    if found_inf is not None:
        torch.autograd.graph.increment_version(found_inf)


def _require_writable(tensors: Sequence[Tensor], found_inf: Tensor | None = None) -> None:
    """Raise RuntimeError, without text, for tensors that operators do not refuse, or too late;
    `_contracts` then has the error with its text.

    These are an inference tensor outside of inference mode, and a negated view as `found_inf`: the
    dispatcher makes a plain copy of it for the call and does not copy back what was written.
    """
    if torch.compiler.is_compiling():
        return
    if found_inf is not None and found_inf.is_neg():
        raise RuntimeError
    if torch.is_inference_mode_enabled():
        return
    if found_inf is not None and found_inf.is_inference():
        raise RuntimeError
    for _ in map(write_count, tensors):  # raises for inference tensors: the quickest way to ask
        pass


def _run_on_copies(
    error: Exception,
    contract: Callable[..., Any],
    op: Any,
    written: Sequence[Tensor],
    read: Sequence[Tensor],
    options: dict[str, Any],
) -> Any:
    """Return the result of a call that failed because of negated views, or raise its error.

    Operators do not write lists with negated views in them: these are written through copies.
    """
    explained = _contracts.explain(error, contract, written, read, **options)
    if explained is not error or not any(tensor.is_neg() for tensor in written):
        raise explained from None
    plain = [tensor.resolve_neg() for tensor in written]
    result = op(plain, read, **options)
    for tensor, values in zip(written, plain, strict=True):
        if tensor.is_neg():
            tensor.copy_(values)
    return result


_define(
    "accumulate_",
    "(Tensor(a!)[] main_grads, Tensor[] grads, *, {factor}, Tensor(b!)? found_inf=None, "
    "bool overwrite=False) -> Tensor",
    normed=0,
)


@_without_graph
def accumulate_(
    main_grads: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    inv_scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Unscale gradients, check them, add them to the main gradients and find the norm, in one pass.

    `main_grad = main_grad + grad * inv_scale`, or `main_grad = grad * inv_scale` with `overwrite`.
    Product and sum are each rounded once in float32 (float64 if either tensor is float64), then to
    the dtype of the main gradient.

    Args:
        main_grads: buffers to accumulate into, changed in place. float16, bfloat16, float32 and
            float64 may be mixed; any strides that do not overlap.
        grads: one gradient per main gradient, of its shape. Dtype and strides need not match.
        inv_scale: 1 / loss scale. A float, or a 0-dim tensor that is read on its device.
        found_inf: 0-dim float32. Set to 1.0 if a gradient is not finite, otherwise left as it was.
        overwrite: ignore what the main gradients held; they may be uninitialised.

    Returns:
        The 2-norm of the updated main gradients as one vector, 0-dim, float32 (float64 if a main
        gradient is).

    Raises:
        ValueError: lengths, shapes or devices differ, or a main gradient overlaps itself.
        TypeError: an entry is not a dense floating-point tensor, or `overwrite` no bool.

    Example:
        >>> main_grads = [torch.zeros(3)]
        >>> grads = [torch.tensor([3.0, 0.0, 4.0], dtype=torch.bfloat16)]
        >>> accumext.accumulate_(main_grads, grads, inv_scale=0.5)
        tensor(2.5000)

    The pass is the one of `multi_tensor_axpby` in NVIDIA apex's former `amp`, with the norm added.
    """
    if type(overwrite) is not bool:  # operators also take numbers as bools
        bools("accumulate_", overwrite=overwrite)
    op = _ops.accumulate_.default if isinstance(inv_scale, Tensor) else _ops.accumulate_.scalar
    options = {"inv_scale": inv_scale, "found_inf": found_inf, "overwrite": overwrite}
    try:
        _require_writable(main_grads, found_inf)
        norm: Tensor = op(main_grads, grads, **options)
    except (AttributeError, RuntimeError, TypeError) as error:
        contract = _contracts.accumulate_
        norm = _run_on_copies(error, contract, op, main_grads, grads, options)
    _mark_written(main_grads, found_inf)
    return norm


def accumulate_recorded(
    norms: list[Tensor],
    main_grads: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    inv_scale: float | Tensor,
    found_inf: Tensor | None = None,
    overwrite: bool = False,
    if_finite: bool = False,
) -> None:
    """Run `accumulate_` on valid operands, and append the norm to a list in the same call.

    With `if_finite`, run `unscale_check_clip_accumulate_` without a limit. Python handles signals,
    such as that of Ctrl-C, between two calls. Since kernel and append are one call, the list tells
    after any exception whether the main gradients were written.
    """
    operation = _ops.unscale_check_clip_accumulate_ if if_finite else _ops.accumulate_
    op = operation.default if isinstance(inv_scale, Tensor) else operation.scalar
    options: dict[str, Any] = {
        "inv_scale": inv_scale, "found_inf": found_inf, "overwrite": overwrite
    }  # fmt: skip
    if if_finite:
        options.update(max_norm=math.inf, if_finite=True)
    _mark_written(main_grads, found_inf)
    norms.extend(map(functools.partial(call_of_operator(op), main_grads, **options), (grads,)))


def scale_recorded(done: list[Any], tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Run `scale_` on valid operands, and append to a list as `accumulate_recorded` does."""
    op = _ops.scale_.default if isinstance(factor, Tensor) else _ops.scale_.scalar
    torch.autograd.graph.increment_version(tensors)
    done.extend(map(functools.partial(call_of_operator(op), tensors), (factor,)))


def multiply_valid(
    products: Sequence[Tensor], sources: Sequence[Tensor], factor: float | Tensor
) -> Tensor:
    """Write `sources * factor` into valid products, which autograd has not seen yet.

    Returns:
        The norm of the products.
    """
    op = _ops.accumulate_.default if isinstance(factor, Tensor) else _ops.accumulate_.scalar
    norm: Tensor = op(products, sources, inv_scale=factor, overwrite=True)
    return norm


_define(
    "unscale_check_clip_accumulate_",
    "(Tensor(a!)[] main_grads, Tensor[] grads, *, {factor}, float max_norm, float norm_type=2.0, "
    "Tensor(b!)? found_inf=None, bool overwrite=False, bool if_finite=False) -> Tensor",
    normed=1,
)


@_without_graph
def unscale_check_clip_accumulate_(
    main_grads: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    inv_scale: float | Tensor = 1.0,
    max_norm: float,
    norm_type: float = 2.0,
    found_inf: Tensor | None = None,
    overwrite: bool = False,
    if_finite: bool = False,
) -> Tensor:
    """Clip one micro-batch to `max_norm` and accumulate it, in two reads of its gradients.

    With `norm` the norm of `grads * inv_scale` and `clip_coef = min(1, max_norm / (norm + 1e-6))`:
    `main_grad = main_grad + grad * (inv_scale * clip_coef)`, the factor formed in the accumulation
    dtype of each pair.

    Args:
        main_grads: buffers to accumulate into, changed in place, as in `accumulate_`.
        grads: one gradient per main gradient, of its shape.
        inv_scale: 1 / loss scale. A float, or a 0-dim tensor that is read on its device.
        max_norm: the largest norm this micro-batch may add; `inf` does not clip.
        norm_type: p of the p-norm, any nonzero number, or `inf` for the largest magnitude.
        found_inf: 0-dim float32. Set to 1.0 if a gradient is not finite, otherwise left as it was.
        overwrite: ignore what the main gradients held; they may be uninitialised.
        if_finite: leave the main gradients bit for bit as they were if a gradient is not finite.
            Decided on the device.

    Returns:
        The norm of `grads * inv_scale` before clipping, 0-dim, float32 (float64 if a gradient is).

    Raises:
        ValueError: lengths, shapes or devices differ, a main gradient overlaps itself, `max_norm`
            is negative or NaN, or `norm_type` is 0 or NaN.
        TypeError: an entry is not a dense floating-point tensor, or an option no bool.

    Example:
        >>> main_grads, grads = [torch.zeros(2)], [torch.tensor([3.0, 4.0])]
        >>> accumext.unscale_check_clip_accumulate_(main_grads, grads, max_norm=1.0)
        tensor(5.)
        >>> main_grads
        [tensor([0.6000, 0.8000])]

    The clip is that of `torch.nn.utils.clip_grad_norm_`.
    """
    if type(overwrite) is not bool or type(if_finite) is not bool:
        name = "unscale_check_clip_accumulate_"
        bools(name, overwrite=overwrite, if_finite=if_finite)
    overloads = _ops.unscale_check_clip_accumulate_
    op = overloads.default if isinstance(inv_scale, Tensor) else overloads.scalar
    options = {
        "inv_scale": inv_scale,
        "max_norm": max_norm,
        "norm_type": norm_type,
        "found_inf": found_inf,
        "overwrite": overwrite,
        "if_finite": if_finite,
    }
    try:
        _require_writable(main_grads, found_inf)
        norm: Tensor = op(main_grads, grads, **options)
    except (AttributeError, RuntimeError, TypeError) as error:
        contract = _contracts.unscale_check_clip_accumulate_
        norm = _run_on_copies(error, contract, op, main_grads, grads, options)
    _mark_written(main_grads, found_inf)
    return norm


_define(
    "total_norm",
    "(Tensor[] grads, *, float norm_type=2.0, {factor}, Tensor(a!)? found_inf=None) -> Tensor",
    normed=0,
)


@_without_graph
def total_norm(
    grads: Sequence[Tensor],
    *,
    norm_type: float = 2.0,
    inv_scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Return the norm of unscaled gradients as one vector, in one read.

    `(sum |grad * inv_scale| ** p) ** (1 / p)`; the largest magnitude for p = inf, the smallest for
    p = -inf, NaN if any element is. Sums are formed per chunk in float32 (float64 for float64) and
    combined in a fixed order: the same bits for any number of threads.

    Args:
        grads: dense floating-point tensors of any dtypes, shapes and strides. None, or only empty
            ones, give 0.
        norm_type: p, any nonzero number, or `inf` or `-inf`.
        inv_scale: 1 / loss scale. A float, or a 0-dim tensor that is read on its device.
        found_inf: 0-dim float32. Set to 1.0 if a gradient is not finite, otherwise left as it was.

    Returns:
        The norm, 0-dim, float32 (float64 if a gradient is).

    Raises:
        ValueError: devices differ, or `norm_type` is 0 or NaN.
        TypeError: an entry is not a dense floating-point tensor.

    Example:
        >>> accumext.total_norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float16)])
        tensor(5.)
    """
    op = _ops.total_norm.default if isinstance(inv_scale, Tensor) else _ops.total_norm.scalar
    try:
        _require_writable((), found_inf)
        norm: Tensor = op(grads, norm_type=norm_type, inv_scale=inv_scale, found_inf=found_inf)
    except (AttributeError, RuntimeError, TypeError) as error:
        options = {"norm_type": norm_type, "inv_scale": inv_scale, "found_inf": found_inf}
        raise _contracts.explain(error, _contracts.total_norm, grads, **options) from None
    _mark_written((), found_inf)
    return norm


_define(
    "scale_",
    "(Tensor(a!)[] grads, {factor}) -> ()",
    factors=("Tensor factor", "float factor"),
)


@_without_graph
def scale_(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place: `grad = grad * factor`, a no-op if the factor is exactly 1.0.

    The product is rounded once in float32 (float64 for float64), then to the dtype of the tensor.

    Args:
        grads: dense floating-point tensors of any dtypes and shapes; any strides that do not
            overlap.
        factor: a float, or a 0-dim tensor that is read on its device.

    Raises:
        ValueError: devices differ, or a tensor overlaps itself.
        TypeError: an entry is not a dense floating-point tensor.

    Example:
        >>> grads = [torch.tensor([2.0, 4.0])]
        >>> accumext.scale_(grads, 0.5)
        >>> grads
        [tensor([1., 2.])]
    """
    op = _ops.scale_.default if isinstance(factor, Tensor) else _ops.scale_.scalar
    try:
        _require_writable(grads)
        op(grads, factor)
    except (AttributeError, RuntimeError, TypeError) as error:
        explained = _contracts.explain(error, _contracts.scale_, grads, factor)
        if explained is not error or not any(grad.is_neg() for grad in grads):
            raise explained from None
        # Multiplying the memory under a negated view multiplies the view as well.
        op([negated_view(grad) if grad.is_neg() else grad for grad in grads], factor)
    _mark_written(grads)


# `scale_` of valid operands by a float, in one call of C++.
SCALE: Callable[[Sequence[Tensor], float], None] = call_of_operator(_ops.scale_.scalar)


# `total_norm` of valid operands times a float, `inv_scale`, in one call of C++.
TOTAL_NORM: Callable[..., Tensor] = call_of_operator(_ops.total_norm.scalar)


_define_overload(
    "copy_rounded_",
    "",
    "(Tensor(a!)[] targets, Tensor[] sources, *, Tensor? seed=None, Tensor? found_inf=None) -> ()",
)


@_without_graph
def copy_rounded_(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    *,
    seed: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Copy tensors into others of a dtype with fewer digits, in one pass: `target = round(source)`.

    Without a seed, to the nearest value, ties to even, as `Tensor.copy_` does. With a seed,
    stochastically: to one of the two neighbours of the value in the dtype of the target, the
    nearer one more often, so that the expectation of the result is the value. If half-precision
    weights are written after every optimizer step, updates that are smaller than half the distance
    of two neighbours are then not lost.

    A value that the dtype of the target can represent is unchanged, and so are inf and NaN. Beyond
    the largest finite number of the dtype there is no second neighbour, and values are rounded to
    nearest. A target that is as wide as its source, or wider, gets a plain copy.

    The random bits of an element depend only on the seed, on the number of its tensor in the list
    and on the number of the element in its tensor in row-major order: results are the same for
    any strides, number of threads and backend. They are those of Philox4x32-7 with the seed as
    its key. Probabilities are exact for bfloat16 of float32 and for normal numbers in float16 of
    float32, and otherwise multiples of 2 ** -31.

    Args:
        targets: changed in place. float16, bfloat16, float32 and float64 may be mixed; any strides
            that do not overlap.
        sources: one per target, of its shape. Dtype and strides need not match.
        seed: 0-dim int64 tensor, read on its device; a new value for every call, for example
            incremented by `seed.add_(1)`. None rounds to nearest.
        found_inf: 0-dim float32 tensor, read on its device. If it is not 0, no target is written.

    Raises:
        ValueError: lengths, shapes or devices differ, or a target overlaps itself, another target
            or a source other than its own.
        TypeError: an entry is not a dense floating-point tensor, or `seed` is not an int64 one.

    Example:
        >>> weights, masters = [torch.zeros(2, dtype=torch.bfloat16)], [torch.tensor([1.0, 1.005])]
        >>> accumext.copy_rounded_(weights, masters)
        >>> weights
        [tensor([1.0000, 1.0078], dtype=torch.bfloat16)]
        >>> accumext.copy_rounded_(weights, masters, seed=torch.tensor(0))

    Philox is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    op = _ops.copy_rounded_.default
    options = {"seed": seed, "found_inf": found_inf}
    try:
        _require_writable(targets)
        op(targets, sources, **options)
    except (AttributeError, RuntimeError, TypeError) as error:
        _run_on_copies(error, _contracts.copy_rounded_, op, targets, sources, options)
    _mark_written(targets)


_register(
    "accumext::window_factors",
    torch.library.infer_schema(reference.window_factors, mutates_args=("numbers", "flags")),
    reference.window_factors,
    lambda *_, **__: None,
)
WINDOW_FACTORS: Callable[..., None] = call_of_operator(_ops.window_factors.default)
