"""Closing a window: measure its gradient, clip it, and lend it to the wrapped optimizer's step."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accumext import _memory_overlap, ops
from accumext._scalars import (
    Scalar,
    any_of,
    as_tensor,
    at_most_one,
    flag,
    known,
    larger,
    not_finite,
    on,
    quotient,
)
from accumext._tensor_kinds import global_norm, per_device, zero_flag
from accumext.optimizer._grad_slots import versions
from accumext.optimizer._main_grads import MainGrads
from accumext.optimizer._product_memory import ProductMemory
from accumext.optimizer._window import Window


class Measure(NamedTuple):
    """What is known of a window's gradient before the step."""

    norm: Scalar  # of the normalised gradient, before clipping
    norm_dtype: torch.dtype  # float64 if any main gradient is, else float32
    device: torch.device  # of the norm
    clip_coef: Scalar
    factor: Scalar  # main gradients to clipped gradient
    skip: Scalar  # 1.0 where no step may be taken
    found_inf: Scalar  # 1.0 where anything that came in was not finite
    scaled: list[Tensor] | None  # main * factor, where the read that found the norm formed it too


class StepGradient(NamedTuple):
    """The window's gradient as the wrapped optimizer is to see it."""

    lent: MainGrads  # for `.grad`, while the step runs
    factor: Scalar  # what is left for the optimizer to multiply it with
    takes_scale: bool  # whether the optimizer does that, and skips at `found_inf`
    skip: Scalar

    def of(self, parameters: list[Tensor]) -> list[Tensor | None]:
        """What each parameter is lent."""
        holders = self.lent.parameters
        if len(holders) == len(parameters) and all(map(is_, holders, parameters)):
            return list(self.lent.tensors)
        lent = self.lent.by_parameter
        return [lent.get(parameter) for parameter in parameters]


def measure(
    optimizer: Optimizer,
    window: Window,
    max_norm: float | None,
    norm_type: float,
    reduction: str,
    memory: ProductMemory,
) -> Measure:
    """Norm, finite check, clip coefficient and factor, in at most one read of the gradients.

    Where the factor is known before the norm, and nobody else will multiply, the read also writes.
    """
    window.settle()
    mains = window.mains
    found_inf = window.found_inf()
    normaliser = window.normaliser(reduction)
    scaled: list[Tensor] | None = None
    if window.norm is not None and norm_type == 2.0 and not _overflowed(window.norm):
        main_norm = window.norm
        norm = known(main_norm) * normaliser
        broken = not_finite(known(main_norm))
    elif max_norm is None and norm_type == 2.0 and _multiplies(optimizer, window, normaliser):
        overflow = zero_flag(mains.tensors[0].device)
        scaled = memory.like(mains)
        factor = on(overflow.device, normaliser)
        main_norm = ops.accumulate_(
            scaled, mains.tensors, inv_scale=factor, found_inf=overflow, overwrite=True
        )
        norm, broken = known(main_norm), known(overflow)
    else:
        overflow = zero_flag(mains.tensors[0].device if mains.tensors else None)
        # Powers of scaled gradients overflow where those of the gradients do not. Squares are far
        # from it, unless one has.
        first = norm_type != 2.0 or window.norm is not None
        norm_of = ops.total_norm if mains.plain else global_norm
        main_norm = norm_of(
            mains.tensors,
            norm_type=norm_type,
            inv_scale=on(overflow.device, _number(normaliser)) if first else 1.0,
            found_inf=overflow,
        )
        norm, broken = known(main_norm), known(overflow)
        if not first:
            norm = norm * normaliser
        if max_norm is not None:  # a norm that overflowed would clip everything to zero
            broken = larger(broken, not_finite(known(main_norm)))
    broken = larger(broken, not_finite(normaliser))  # a loss scale that has become zero
    dropped = found_inf if window.survivors is None else flag(window.survivors == 0)
    clip_coef: Scalar = 1.0
    if max_norm is not None:
        clip_coef = at_most_one(quotient(max_norm, norm + 1e-6))
    return Measure(
        norm=norm,
        norm_dtype=main_norm.dtype,
        device=main_norm.device,
        clip_coef=clip_coef,
        factor=normaliser if max_norm is None else normaliser * clip_coef,
        skip=larger(broken, dropped),
        found_inf=larger(broken, found_inf),
        scaled=scaled,
    )


def step_gradient(
    optimizer: Optimizer, window: Window, measured: Measure, memory: ProductMemory
) -> StepGradient:
    """`main * factor`, apart from `main` unless the optimizer multiplies, or there is nothing to.

    An optimizer that takes `grad_scale` and `found_inf` multiplies and skips in its own read. For
    any other one the host reads whether to skip.
    """
    mains, factor, skip = window.mains, measured.factor, measured.skip
    takes_scale = _takes_scale(optimizer, window)
    if not isinstance(skip, Tensor) and skip:
        return StepGradient(mains, factor, takes_scale, skip)
    casts = {} if window.attached else mains.casts
    multiplies = isinstance(factor, Tensor) or factor != 1.0
    # What divides in a fused kernel is a float32, and only where a gradient is dense. The kernel
    # writes back what it has divided, which nothing else may share.
    folds = takes_scale and mains.dense and not casts and measured.norm_dtype == torch.float32
    if folds and multiplies and window.attached and _any_shared(mains.tensors):
        folds = False
    lent = mains.without(casts)
    if measured.scaled is not None:
        lent = MainGrads(lent.parameters, measured.scaled)
    elif multiplies and not folds:
        lent = _multiplied(lent, factor, memory)[0]
    if casts:
        stored, norms = _multiplied(MainGrads.of(casts), factor, memory)
        lent = MainGrads.of(lent.by_parameter | stored.by_parameter)
        skip = larger(skip, any_of(not_finite(known(norm)) for norm in norms))
    if isinstance(skip, Tensor) and not takes_scale:
        skip = 0.0 if skip.is_meta else float(bool(skip))
    return StepGradient(lent, factor if folds else 1.0, takes_scale, skip)


def run_step(
    optimizer: Optimizer,
    gradient: StepGradient,
    device: torch.device,
    has_stepped: Moved,
    kwargs: dict[str, Any],
) -> Any:
    """The wrapped optimizer's step on what was lent, told what to multiply it with, and to skip.

    What tells it stays on the optimizer, also after an exception: see `forget_scale`.
    """
    attributes: dict[str, Tensor | None] = {}
    if gradient.takes_scale:
        attributes = dict.fromkeys(("grad_scale", "found_inf"))
        if isinstance(gradient.factor, Tensor) or gradient.factor != 1.0:
            divisor = quotient(1.0, gradient.factor)
            attributes["grad_scale"] = as_tensor(divisor, torch.float32, device)
        if isinstance(gradient.skip, Tensor):
            attributes["found_inf"] = gradient.skip.float()
    hook = _prepare(optimizer, attributes, has_stepped)
    try:
        return optimizer.step(**kwargs)
    finally:
        hook.remove()


_any_shared = _disable_dynamo(_memory_overlap.any_shared)  # a tensor that is traced has no address


# torch.compile would compile the step anew for every hook, and does not set attributes of an
# optimizer before torch 2.13.
@_disable_dynamo
def _prepare(
    optimizer: Optimizer, attributes: dict[str, Tensor | None], has_stepped: Moved
) -> RemovableHandle:
    """Set the attributes, and have the first of the post-hooks tell that the step has ended."""
    vars(optimizer).update(attributes)
    return has_stepped.watch(optimizer)


def forget_scale(optimizer: Optimizer) -> None:
    """Remove what GradScaler, or `run_step` in its place, sets for the length of a step."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


class Moved:
    """Tells, after an exception, whether an optimizer has written parameters.

    Their versions say so, but not after torch's fused kernels, which do not count. After those the
    first of the post-hooks does: the step itself had come to its end.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters, self._before = parameters, versions(parameters)
        self._ended = False

    def __call__(self) -> bool:
        return self._ended or versions(self._parameters) != self._before

    def watch(self, optimizer: Optimizer) -> RemovableHandle:
        """Hear of the end of the step, before any other hook does, until the handle is removed."""
        handle = optimizer.register_step_post_hook(self._end)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)
        return handle

    def _end(self, *args: object) -> None:
        self._ended = True


def _number(factor: Scalar) -> Scalar:
    """A factor that an operator takes: one that is not finite makes nothing finite, and skips."""
    return 1.0 if not isinstance(factor, Tensor) and not_finite(factor) else factor


def _overflowed(norm: Tensor) -> bool:
    """Whether the squares may have overflowed where the elements did not, as far as known here."""
    value = known(norm)
    return not isinstance(value, Tensor) and bool(not_finite(value))


def _takes_scale(optimizer: Optimizer, window: Window) -> bool:
    """Whether the optimizer multiplies with `grad_scale` and skips at `found_inf`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not window.mains.sharded


def _multiplies(optimizer: Optimizer, window: Window, factor: Scalar) -> bool:
    """Whether it is here that main gradients have to be multiplied, and one call can do it."""
    if _takes_scale(optimizer, window) or window.mains.casts or not window.mains.plain:
        return False
    if not isinstance(factor, Tensor) and not_finite(factor):
        return False
    return bool(window.mains.tensors) and (isinstance(factor, Tensor) or factor != 1.0)


def _multiplied(
    mains: MainGrads, factor: Scalar, memory: ProductMemory
) -> tuple[MainGrads, list[Tensor]]:
    """`main * factor` in the dtype of the parameters; norms of what came out."""
    stored = memory.like(mains)
    calls = per_device(stored, mains.tensors, plain_already=mains.plain)
    norms = [
        ops.accumulate_(products, sources, inv_scale=on(device, factor), overwrite=True)
        for device, (products, sources) in calls
    ]
    return MainGrads(mains.parameters, stored), norms
