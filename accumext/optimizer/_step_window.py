"""Closing a window: find its norm, clip it, lend it to the wrapped optimizer's step, and report."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as record_function
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accumext import _memory_overlap, ops
from accumext._scalars import (
    Scalar,
    any_flag,
    as_flag,
    as_tensor,
    at_most_one,
    divide,
    maximum,
    nonfinite_flag,
    to_device,
    to_host_if_free,
)
from accumext._tensor_kinds import global_norm, group_by_device, nonfinite, zero_flag
from accumext.optimizer._accumulator import Accumulator, Transaction
from accumext.optimizer._arguments import OP, Settings
from accumext.optimizer._grad_slots import GradSlots, versions
from accumext.optimizer._loss_scaling import forget_scale
from accumext.optimizer._main_grads import MainGrads
from accumext.optimizer._product_memory import ProductMemory
from accumext.optimizer._window import Window
from accumext.optimizer._window_all_reduce import sum_over_processes
from accumext.optimizer._window_report import WindowReport


def step_window(
    accumulator: Accumulator,
    proxy: Optimizer,  # the AccumulatingOptimizer, under whose id the scaler knows it
    op: str,
    transaction: Transaction,
    slots: GradSlots,  # what lies in `.grad`
    kwargs: dict[str, Any],  # of the wrapped step
    flushing: bool = False,
) -> Any:
    """Step on the open window, if there is anything in it, and start the next."""
    window, optimizer, parameters = accumulator.window, accumulator.optimizer, slots.parameters
    if window.micro_batches:
        accumulator.scaling.refuse_to_forget_others(op, proxy)
    with _span("accumext::step"):
        if accumulator.group is not None or window.held_back:
            if not sum_over_processes(accumulator, op, parameters, flushing):
                return None
            slots = GradSlots.of(parameters)  # a window that lay in `.grad` was taken out
            transaction.savepoint(slots)
        elif window.micro_batches == 0:
            return None
        if not window.in_order:
            window.sort(parameters)
        measured = measure(optimizer, window, accumulator.settings, accumulator.product_memory)
        gradient = step_gradient(optimizer, window, measured, accumulator.product_memory)
        lent = gradient.of(parameters)
        watch = StepWatch(parameters)
        close, has_updated = _closing(accumulator, proxy, parameters, measured, gradient.skip)

        def finish() -> None:
            slots.take_back(lent)
            close()

        transaction.before_irrevocable(
            finish,
            has_happened=lambda: watch.has_moved() or has_updated(),
            always=lambda: forget_scale(vars(optimizer)),
        )
        result = None
        if isinstance(gradient.skip, Tensor) or not gradient.skip:
            slots.lend(lent)
            result = run_step(optimizer, gradient, measured.device, watch, kwargs)
        forget_scale(vars(optimizer))
        finish()
    if not isinstance(gradient.skip, Tensor) and gradient.skip:
        _warn_of_skip(accumulator, proxy, window)
    return result


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
    optimizer: Optimizer, window: Window, settings: Settings, memory: ProductMemory
) -> Measure:
    """Norm, finite check, clip coefficient and factor, in at most one read of the gradients.

    Where the factor is known before the norm, and nobody else will multiply, the read also writes.
    """
    max_norm, norm_type = settings.max_norm, settings.norm_type
    window.coalesce()
    mains = window.main_grads
    found_inf = window.found_inf()
    normaliser = window.normaliser(settings.reduction)
    scaled: list[Tensor] | None = None
    main_norm: Tensor | None = None
    if norm_type == 2.0 and window.norm is not None:
        norm = to_host_if_free(window.norm)
        # Squares may have overflowed where the elements did not: then the norm is found again.
        if isinstance(norm, Tensor) or math.isfinite(norm):
            main_norm, broken = window.norm, nonfinite_flag(norm)
            norm = norm * normaliser
    if main_norm is None:
        overflow = zero_flag(mains.tensors[0].device if mains.tensors else None)
        in_units = False  # of the normalised gradient
        if max_norm is None and norm_type == 2.0 and _multiplies(optimizer, window, normaliser):
            scaled = memory.like(mains)
            in_units = True
            main_norm = ops.accumulate_(
                scaled,
                mains.tensors,
                inv_scale=to_device(overflow.device, normaliser),
                found_inf=overflow,
                overwrite=True,
            )
        else:
            # Powers of scaled gradients overflow where those of the gradients do not. Squares are
            # far from it, unless one has.
            in_units = norm_type != 2.0 or window.norm is not None
            factor = _number(normaliser) if in_units else 1.0
            norm_of = ops.total_norm if mains.one_call else global_norm
            main_norm = norm_of(
                mains.tensors,
                norm_type=norm_type,
                inv_scale=to_device(overflow.device, factor),
                found_inf=overflow,
            )
        norm, broken = to_host_if_free(main_norm), to_host_if_free(overflow)
        if max_norm is not None:  # a norm that overflowed would clip everything to zero
            broken = maximum(broken, nonfinite_flag(norm))
        if not in_units:
            norm = norm * normaliser
    broken = maximum(broken, nonfinite_flag(normaliser))  # a loss scale that has become zero
    finite = window.finite_micro_batches
    dropped = found_inf if finite is None else as_flag(finite == 0)
    clip_coef: Scalar = 1.0
    if max_norm is not None:
        clip_coef = at_most_one(divide(max_norm, norm + 1e-6))
    return Measure(
        norm=norm,
        norm_dtype=main_norm.dtype,
        device=main_norm.device,
        clip_coef=clip_coef,
        factor=normaliser if max_norm is None else normaliser * clip_coef,
        skip=maximum(broken, dropped),
        found_inf=maximum(broken, found_inf),
        scaled=scaled,
    )


def step_gradient(
    optimizer: Optimizer, window: Window, measured: Measure, memory: ProductMemory
) -> StepGradient:
    """`main * factor`, apart from `main` unless the optimizer multiplies, or there is nothing to.

    An optimizer that takes `grad_scale` and `found_inf` multiplies and skips in its own read. For
    any other one the host reads whether to skip.
    """
    mains, factor, skip = window.main_grads, measured.factor, measured.skip
    takes_scale = _takes_scale(optimizer, window)
    if not isinstance(skip, Tensor) and skip:
        return StepGradient(mains, factor, takes_scale, skip)
    casts = {} if window.attached is not None else mains.casts
    multiplies = isinstance(factor, Tensor) or factor != 1.0
    # What divides in a fused kernel is a float32, and only where a gradient is dense. The kernel
    # writes back what it has divided, which nothing else may share.
    folds = takes_scale and mains.dense and not casts and measured.norm_dtype == torch.float32
    if folds and multiplies and window.attached is not None and _any_shared(mains.tensors):
        folds = False
    lent = mains.without(casts) if casts else mains
    if measured.scaled is not None:
        lent = MainGrads(lent.parameters, measured.scaled)
    elif multiplies and not folds:
        lent = _multiplied(lent, factor, memory)[0]
    if casts:
        stored, norms = _multiplied(MainGrads.of(casts), factor, memory)
        lent = MainGrads.of(lent.by_parameter | stored.by_parameter)
        skip = maximum(skip, any_flag(nonfinite_flag(to_host_if_free(norm)) for norm in norms))
    if isinstance(skip, Tensor) and not takes_scale:
        skip = 0.0 if skip.is_meta else float(bool(skip))
    return StepGradient(lent, factor if folds else 1.0, takes_scale, skip)


def run_step(
    optimizer: Optimizer,
    gradient: StepGradient,
    device: torch.device,
    watch: StepWatch,
    kwargs: dict[str, Any],
) -> Any:
    """The wrapped optimizer's step on what was lent, told what to multiply it with, and to skip.

    What tells it stays on the optimizer, also after an exception: see `forget_scale`.
    """
    attributes: dict[str, Tensor | None] = {}
    if gradient.takes_scale:
        attributes = dict.fromkeys(("grad_scale", "found_inf"))
        if isinstance(gradient.factor, Tensor) or gradient.factor != 1.0:
            divisor = divide(1.0, gradient.factor)
            attributes["grad_scale"] = as_tensor(divisor, torch.float32, device)
        if isinstance(gradient.skip, Tensor):
            attributes["found_inf"] = gradient.skip.float()
    hook = _prepare(optimizer, attributes, watch)
    try:
        return optimizer.step(**kwargs)
    finally:
        hook.remove()


# A tensor that is traced has no address.
_any_shared = _disable_dynamo(_memory_overlap.any_shared)


# torch.compile would compile the step anew for every hook, and does not set attributes of an
# optimizer before torch 2.13.
@_disable_dynamo
def _prepare(
    optimizer: Optimizer, attributes: dict[str, Tensor | None], watch: StepWatch
) -> RemovableHandle:
    """Set the attributes, and have the first of the post-hooks tell that the step has ended."""
    vars(optimizer).update(attributes)
    return watch.begin(optimizer)


class StepWatch:
    """Tells, after an exception, whether an optimizer has written parameters.

    Their versions say so, but not after torch's fused kernels, which do not count. After those the
    first of the post-hooks does: the step itself had come to its end.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters, self._before = parameters, versions(parameters)
        self._ended = False

    def has_moved(self) -> bool:
        """Whether any parameter may have changed."""
        return self._ended or versions(self._parameters) != self._before

    def begin(self, optimizer: Optimizer) -> RemovableHandle:
        """Hear of the end of the step, before any other hook does, until the handle is removed."""
        handle = optimizer.register_step_post_hook(self._end)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)
        return handle

    def _end(self, *args: object) -> None:
        self._ended = True


def _closing(
    accumulator: Accumulator,
    proxy: Optimizer,
    parameters: list[Tensor],
    measured: Measure,
    skip: Scalar,
) -> tuple[Callable[[], None], Callable[[], bool]]:
    """What is left to do after the step, and whether the part of it that cannot be undone is.

    It may be done twice.
    """
    scaling, has_scaler = accumulator.scaling, accumulator.settings.scaler is not None
    if has_scaler and scaling.scale_tensor is None:
        scaling.create_scale(measured.device)  # a copy has none to update
    report = _report(accumulator, measured, skip)
    attached, successor = accumulator.window.attached, Window()
    found_inf, epoch = maximum(skip, measured.found_inf), scaling.epoch

    def has_updated() -> bool:
        return has_scaler and scaling.epoch is not epoch

    def close() -> None:
        consumed = accumulator.consumed
        if attached is not None:
            accumulator.watch.callback = None
            produced = attached.grads if attached.produced else None
            consumed = consumed.after(GradSlots.of(parameters).grads, produced)
        accumulator.close(report, successor, consumed)
        if has_scaler and not has_updated():
            scaling.update(proxy, found_inf, measured.device)

    return close, has_updated


def _report(accumulator: Accumulator, measured: Measure, skipped: Scalar) -> WindowReport:
    window = accumulator.window
    counted, weight = window.counted(), window.weight
    if window.unchecked:  # a micro-batch that would have been dropped
        counted, weight = counted * (1.0 - skipped), weight * (1.0 - skipped)
    report = WindowReport(
        skipped=skipped,
        total_norm=measured.norm,
        clip_coef=measured.clip_coef,
        loss_scale=window.loss_scale,
        weight=weight,
        micro_batches=counted,
        dtype=measured.norm_dtype,
        device=measured.device,
    )
    if isinstance(skipped, Tensor):
        report.keep(window.by_parameter, accumulator.names)
    elif window.dropped or skipped:
        culprits = {*window.dropped, *(nonfinite(window.by_parameter) if skipped else ())}
        report.name([name for p, name in accumulator.names().items() if p in culprits])
    return report


def _warn_of_skip(accumulator: Accumulator, proxy: Optimizer, window: Window) -> None:
    """Say once that a window was skipped where no loss scale is there to be found by trying."""
    report, scale = accumulator.last, window.loss_scale
    if report is None or "found_inf" in vars(proxy) or isinstance(scale, Tensor) or scale > 1.0:
        return
    names = ", ".join(map(str, report.nonfinite))
    where = f"the gradient of {names}" if names else f"its sum, with a loss scale of {scale:g}"
    accumulator.warn_once(
        "skip",
        f"{OP}: a window was skipped, for inf or NaN in {where}. This is said once; "
        "opt.last.skipped and opt.last.nonfinite tell of every window, and "
        "on_nonfinite='raise' stops at the first",
    )


def _number(factor: Scalar) -> Scalar:
    """A factor that an operator takes: one that is not finite makes nothing finite, and skips."""
    return 1.0 if not isinstance(factor, Tensor) and nonfinite_flag(factor) else factor


def _takes_scale(optimizer: Optimizer, window: Window) -> bool:
    """Whether the optimizer multiplies with `grad_scale` and skips at `found_inf`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not window.main_grads.sharded


def _multiplies(optimizer: Optimizer, window: Window, factor: Scalar) -> bool:
    """Whether it is here that main gradients have to be multiplied, and one call can do it."""
    if _takes_scale(optimizer, window) or window.main_grads.casts or not window.main_grads.one_call:
        return False
    if not isinstance(factor, Tensor) and nonfinite_flag(factor):
        return False
    return bool(window.main_grads.tensors) and (isinstance(factor, Tensor) or factor != 1.0)


def _multiplied(
    mains: MainGrads, factor: Scalar, memory: ProductMemory
) -> tuple[MainGrads, list[Tensor]]:
    """`main * factor` in the dtype of the parameters; norms of what came out."""
    stored = memory.like(mains)
    calls = group_by_device(stored, mains.tensors, one_call=mains.one_call)
    norms = [
        ops.accumulate_(products, sources, inv_scale=to_device(device, factor), overwrite=True)
        for device, (products, sources) in calls
    ]
    return MainGrads(mains.parameters, stored), norms


def _span(name: str) -> AbstractContextManager[Any]:
    """A range in a profile; none under torch.compile, which cannot trace the class."""
    return nullcontext() if torch.compiler.is_compiling() else record_function(name)
