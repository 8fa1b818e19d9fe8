"""Closing a window: find its norm, clip it, lend it to the wrapped optimizer's step, and report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from accumext import _memory_overlap, _scalars, ops
from accumext._scalars import (
    Scalar,
    any_nonfinite,
    any_set,
    as_tensor,
    divide,
    maximum,
    to_device,
    to_host_if_free,
)
from accumext._tensor_kinds import global_norm, group_by_device, zero_flag
from accumext._torch_private import (
    not_compiled,
    record_function,
    step_post_hooks,
    takes_scale,
)
from accumext.optimizer._accumulator import Accumulator, Transaction
from accumext.optimizer._arguments import OP, Settings
from accumext.optimizer._grad_slots import GradSlots, versions
from accumext.optimizer._loss_scaling import forget_scale
from accumext.optimizer._masters import Rounding
from accumext.optimizer._product_memory import ProductMemory
from accumext.optimizer._window import MainGrads, Window
from accumext.optimizer._window_all_reduce import sum_over_processes
from accumext.optimizer._window_factors import (
    Normaliser,
    WindowFactors,
    device_factors,
    window_factors,
)
from accumext.optimizer._window_report import WindowReport, named
from accumext.reference import accumulation_dtype


def step_window(
    accumulator: Accumulator,
    proxy: Optimizer,  # the AccumulatingOptimizer, under whose id the scaler knows it
    op: str,
    transaction: Transaction,
    slots: GradSlots,  # what `.grad` holds
    kwargs: dict[str, Any],  # of the wrapped step
    flushing: bool = False,
) -> Any:
    """Step on the open window, if there is anything in it, and start the next."""
    window, optimizer, parameters = accumulator.window, accumulator.optimizer, slots.parameters
    settings, memory = accumulator.settings, accumulator.product_memory
    if settings.scaler is not None and window.micro_batches:
        accumulator.scaling.refuse_to_forget_others(op, proxy)
    compiling = torch.compiler.is_compiling()  # which cannot trace the class of the span
    with nullcontext() if compiling else record_function("accumext::step"):
        shared = settings.process_group or accumulator.model_group or accumulator.sharded
        if window.held_back or shared:
            if not sum_over_processes(accumulator, op, parameters, flushing):
                return None
            slots = GradSlots.of(parameters)  # main gradients in `.grad` were detached
            transaction.savepoint(slots)
        elif window.micro_batches == 0:
            return None
        if not window.in_order:
            window.sort(parameters)
        masters, stepped_on = accumulator.masters, parameters
        if masters is not None:
            masters.take_over()
            stepped_on = accumulator.stepped_on()
            window.main_grads = masters.of_masters(window.main_grads)
        measured = measure(optimizer, window, settings, memory)
        factors = measured.factors
        gradient = step_gradient(optimizer, window, measured, memory)
        scaling, begun = accumulator.scaling, None
        if settings.scaler is not None:
            begun = scaling.begin_update(measured.device)
        counted, successor = window.counted(), Window()
        report = WindowReport.of_window(
            window, counted, gradient.skip, factors.norm, factors.clip_coef,
            measured.norm_dtype, measured.device, accumulator.names,
        )  # fmt: skip
        lent, lent_to = gradient.of(stepped_on), slots
        rounding: Rounding | None = None
        if masters is not None:
            lent_to = GradSlots.of(stepped_on)
            rounding = masters.rounding(gradient.parameters, gradient.skip)
        watch = StepWatch(stepped_on, rounding)
        attached = window.attached

        def finish() -> None:
            lent_to.take_back(lent)
            if rounding is not None and watch.has_moved():
                rounding.write()
            consumed = accumulator.consumed
            if attached is not None:
                accumulator.watch.callback = None
                produced = attached.grads if attached.produced else None
                consumed = consumed.after(GradSlots.of(parameters).grads, produced)
            accumulator.close(report, successor, consumed)
            if begun is not None:
                scaling.update(begun, proxy, gradient.found_inf, measured.device)

        transaction.rest = finish
        transaction.has_happened = lambda: (
            watch.has_moved() or (begun is not None and scaling.has_updated(begun))
        )

        def always() -> None:
            forget_scale(vars(optimizer))
            lent_to.take_back(lent)

        transaction.always = always
        result = None
        if isinstance(gradient.skip, Tensor) or not gradient.skip:
            lent_to.lend(lent)
            result = call_step(optimizer, gradient, measured.device, watch, kwargs)
        if gradient.takes_scale:
            forget_scale(vars(optimizer))
        finish()
    if not isinstance(gradient.skip, Tensor) and gradient.skip:
        _warn_of_skip(accumulator, proxy, window)
    return result


class Read(NamedTuple):
    """What a read of the main gradients has found."""

    norm: Tensor | None = None
    overflow: Tensor | None = None  # 1.0 where one is not finite; None: nobody has looked
    normalised: bool = False  # the norm is that of the window's gradient
    scaled: list[Tensor] | None = None  # main * factor, where the read has formed it


class Measure(NamedTuple):
    """What is known of a window's gradient before the step."""

    factors: WindowFactors
    norm_dtype: torch.dtype  # float64 if any main gradient is, else float32
    device: torch.device  # of the norm
    scaled: list[Tensor] | None


class StepGradient(NamedTuple):
    """The window's gradient as the wrapped optimizer is to see it."""

    parameters: Sequence[Tensor]  # that are lent a gradient
    grads: list[Tensor]  # for `.grad` of each, while the step runs
    divisor: Scalar  # what is left for the optimizer to divide them by
    takes_scale: bool  # whether the optimizer does that, and skips at `found_inf`
    skip: Scalar  # 1.0 where no step may be taken
    found_inf: Scalar  # 1.0 where the scaler is to hear of an inf or NaN

    def of(self, parameters: list[Tensor]) -> list[Tensor | None]:
        """What each parameter is lent."""
        lenders = self.parameters
        if len(lenders) == len(parameters) and all(map(is_, lenders, parameters)):
            return list(self.grads)
        lent = dict(zip(lenders, self.grads, strict=True))
        return [lent.get(parameter) for parameter in parameters]


def measure(
    optimizer: Optimizer, window: Window, settings: Settings, memory: ProductMemory
) -> Measure:
    """Norm, finite check, clip coefficient and factor, in at most one read of the gradients.

    Where the factor is known before the norm, and nobody else will multiply, the read also writes.
    """
    if not window.main_grads.one_call:
        window.coalesce()
    main_grads, normaliser = window.main_grads, window.normaliser(settings.reduction)
    tensors, max_norm = main_grads.tensors, settings.max_norm
    on_host = not tensors or _scalars.on_host(tensors[0])
    norm = window.norm if settings.norm_type == 2.0 else None
    if norm is not None and on_host and not math.isfinite(norm):
        norm = None  # squares may have overflowed where the elements did not: it is found again
    checks_norm = norm is not None or max_norm is not None  # one that overflowed makes all zero
    read = Read(norm)
    if norm is None:
        read = _read(optimizer, window, settings, memory, normaliser, on_host)
    norm, found_infs = read.norm, window.found_infs.values()
    if on_host:
        assert norm is not None
        factors = window_factors(
            norm,
            normaliser,
            max_norm=max_norm,
            normalised=read.normalised,
            checks_norm=checks_norm,
            overflow=read.overflow,
            found_infs=found_infs,
            finite=window.finite_micro_batches,
        )
        return Measure(factors, norm.dtype, norm.device, read.scaled)
    device = tensors[0].device
    factors = device_factors(
        device,
        tensors,
        norm,
        normaliser,
        max_norm=max_norm,
        normalised=read.normalised,
        checks_norm=checks_norm,
        overflow=read.overflow,
        found_inf=next(iter(found_infs)) if len(found_infs) == 1 else any_set(found_infs),
        finite=window.finite_micro_batches,
    )
    norm_dtype = accumulation_dtype(*tensors) if norm is None else norm.dtype
    return Measure(factors, norm_dtype, device, read.scaled)


def _read(
    optimizer: Optimizer,
    window: Window,
    settings: Settings,
    memory: ProductMemory,
    normaliser: Normaliser,
    on_host: bool,
) -> Read:
    """Find the norm of the main gradients, but leave a plain one of a device to its factors."""
    norm_type, main_grads = settings.norm_type, window.main_grads
    writes = settings.max_norm is None and norm_type == 2.0
    writes = writes and _multiplies(optimizer, main_grads, normaliser)
    # Powers of scaled gradients overflow where those of the gradients do not. Squares are far from
    # it, unless one has.
    normalised = norm_type != 2.0 or window.norm is not None
    if not on_host and main_grads.one_call and not writes and not normalised:
        return Read()
    flag = zero_flag(main_grads.tensors[0].device if main_grads.tensors else None)
    if writes:
        scaled, factor = memory.like(main_grads), to_device(flag.device, normaliser.value())
        norm = ops.accumulate_(
            scaled, main_grads.tensors, inv_scale=factor, found_inf=flag, overwrite=True
        )
        return Read(norm, flag, True, scaled)
    factor = to_device(flag.device, _number(normaliser.value())) if normalised else 1.0
    norm_of = ops.total_norm if main_grads.one_call else global_norm
    norm = norm_of(main_grads.tensors, norm_type=norm_type, inv_scale=factor, found_inf=flag)
    return Read(norm, flag, normalised)


def step_gradient(
    optimizer: Optimizer, window: Window, measured: Measure, memory: ProductMemory
) -> StepGradient:
    """`main * factor`, apart from `main` unless the optimizer multiplies, or there is nothing to.

    An optimizer that takes `grad_scale` and `found_inf` multiplies and skips in its own read. For
    any other one the host reads whether to skip.
    """
    main_grads, factors = window.main_grads, measured.factors
    factor, skip, found_inf = factors.factor, factors.skip, factors.found_inf
    accepts_scale = takes_scale(optimizer) and not main_grads.sharded
    if not isinstance(skip, Tensor) and skip:
        return StepGradient([], [], 1.0, accepts_scale, skip, found_inf)
    casts = {} if window.attached is not None else main_grads.casts
    multiplies = isinstance(factor, Tensor) or factor != 1.0
    # What divides in a fused kernel is a float32, and only where a gradient is dense. The kernel
    # writes back what it has divided, which nothing else may share.
    folds = (
        accepts_scale and main_grads.dense and not casts and measured.norm_dtype == torch.float32
    )
    if folds and multiplies and window.attached is not None and _any_shared(main_grads.tensors):
        folds = False
    same = main_grads.without(casts) if casts else main_grads
    parameters, grads = same.parameters, same.tensors
    divisor: Scalar = 1.0
    if measured.scaled is not None:
        grads = measured.scaled
    elif multiplies and folds:
        divisor = divide(1.0, factor) if factors.inverse is None else factors.inverse
    elif multiplies:
        grads, _ = _multiplied(same, factor, memory)
    if casts:
        products, norms = _multiplied(MainGrads.of(casts), factor, memory)
        parameters, grads = [*parameters, *casts], grads + products
        skip, found_inf = _with_overflow(skip, found_inf, norms)
    if isinstance(skip, Tensor) and not accepts_scale:
        skip = 0.0 if skip.is_meta else float(bool(skip))
    return StepGradient(parameters, grads, divisor, accepts_scale, skip, found_inf)


def _with_overflow(skip: Scalar, found_inf: Scalar, norms: list[Tensor]) -> tuple[Scalar, Scalar]:
    """Both set where a norm is not finite: rounding to half precision has overflowed."""
    flags = [skip] if found_inf is skip else [skip, found_inf]
    for norm in norms:
        if isinstance(skip, Tensor):
            flags = [
                device_factors(
                    norm.device, [], norm, Normaliser(), checks_norm=True, found_inf=flag
                ).found_inf
                for flag in flags
            ]
        else:
            overflow = any_nonfinite(to_host_if_free(norm))
            flags = [maximum(flag, overflow) for flag in flags]
    return flags[0], flags[-1]


def call_step(
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
        if isinstance(gradient.divisor, Tensor) or gradient.divisor != 1.0:
            attributes["grad_scale"] = as_tensor(gradient.divisor, torch.float32, device)
        if isinstance(gradient.skip, Tensor):
            attributes["found_inf"] = gradient.skip.float()
    hook = _prepare(optimizer, attributes, watch)
    try:
        return optimizer.step(**kwargs)
    finally:
        hook.remove()


# A tensor that is traced has no address.
_any_shared = not_compiled(_memory_overlap.any_shared)


# torch.compile would compile the step anew for every hook, and does not set attributes of an
# optimizer before torch 2.13.
@not_compiled
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

    def __init__(self, parameters: list[Tensor], rounding: Rounding | None = None) -> None:
        self._parameters, self._before = parameters, versions(parameters)
        self.rounding = rounding  # of what has been stepped on: hooks find it in the model
        self._ended = False

    def has_moved(self) -> bool:
        """Whether any parameter may have changed."""
        return self._ended or versions(self._parameters) != self._before

    def begin(self, optimizer: Optimizer) -> RemovableHandle:
        """Hear of the end of the step, before any other hook does, until the handle is removed."""
        handle = optimizer.register_step_post_hook(self._end)
        step_post_hooks(optimizer).move_to_end(handle.id, last=False)
        return handle

    def _end(self, *args: object) -> None:
        self._ended = True
        if self.rounding is not None:
            self.rounding.write()


def _warn_of_skip(accumulator: Accumulator, proxy: Optimizer, window: Window) -> None:
    """Say once that a window was skipped where no loss scale is there to be found by trying."""
    report, scale = accumulator.last, window.loss_scale
    if report is None or "found_inf" in vars(proxy) or isinstance(scale, Tensor) or scale > 1.0:
        return
    names = named(report.nonfinite)
    where = f"the gradient of {names}" if names else f"its sum, with a loss scale of {scale:g}"
    accumulator.warn_once(
        "skip",
        f"{OP}: a window was skipped, for inf or NaN in {where}. This is said once; "
        "opt.last.skipped and opt.last.nonfinite tell of every window, and "
        "on_nonfinite='raise' stops at the first",
    )


def _number(factor: Scalar) -> Scalar:
    """A factor that an operator takes: one that is not finite makes nothing finite, and skips."""
    return 1.0 if not isinstance(factor, Tensor) and not math.isfinite(factor) else factor


def _multiplies(optimizer: Optimizer, main_grads: MainGrads, normaliser: Normaliser) -> bool:
    """Whether it is here that main gradients have to be multiplied, and one call can do it."""
    if takes_scale(optimizer) or main_grads.casts or not main_grads.one_call:
        return False
    if normaliser.on_device or not main_grads.tensors:
        return bool(main_grads.tensors)
    factor = normaliser.value()
    return not isinstance(factor, Tensor) and math.isfinite(factor) and factor != 1.0


def _multiplied(
    main_grads: MainGrads, factor: Scalar, memory: ProductMemory
) -> tuple[list[Tensor], list[Tensor]]:
    """`main * factor` in the dtype of the parameters; norms of what came out."""
    products, norms = memory.like(main_grads), list[Tensor]()
    if main_grads.one_call and products:
        number = to_device(products[0].device, factor)
        return products, [ops.multiply_valid(products, main_grads.tensors, number)]
    for device, (mine, sources) in group_by_device(products, main_grads.tensors):
        norms.append(ops.multiply_valid(mine, sources, to_device(device, factor)))
    return products, norms
