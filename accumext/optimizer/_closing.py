"""Closing a window: its gradient is measured, formed, stepped on and reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accumext import ops
from accumext.master_weights import Rounding
from accumext.ops.any_tensors import (
    global_norm,
)
from accumext.optimizer._factors import Normaliser, WindowFactors, normaliser, window_factors
from accumext.optimizer._grads import grad_of, grads_of, is_none, present, put
from accumext.optimizer._report import Name, WindowReport, named
from accumext.optimizer._scaler import update
from accumext.optimizer._sums import multiply, products
from accumext.optimizer._window import NO_WINDOW, Box, State
from accumext.tensors import memory_overlap
from accumext.tensors.checks import message
from accumext.tensors.kinds import (
    any_dtensor,
    coalesced,
    dtype_of,
    fit_one_call,
    local_tensors,
    nonfinite,
    versions,
    zero_flag,
)
from accumext.tensors.scalars import Scalar, as_tensor, divide, to_device
from accumext.tensors.torch_private import (
    STEP_POST_HOOKS,
    TAKES_SCALE,
    not_compiled,
    write_count,
)

_WIDE = {torch.float64, torch.complex128}


class StepWatch:
    """Tells, after an exception, whether an optimizer has written parameters.

    Their versions say so, but not after torch's fused kernels, which do not count, nor after writes
    through `.data`. After those the first of the post-hooks does: the step itself had ended. Where
    an optimizer runs no hooks, versions are all there is.
    """

    def __init__(self, parameters: list[Tensor], rounding: Rounding | None = None) -> None:
        self._parameters = parameters
        try:
            self._before: list[int | None] = list(map(write_count, parameters))
        except RuntimeError:  # one of inference mode
            self._before = versions(parameters)
        self.rounding = rounding  # of what has been stepped on: hooks find it in the model
        self._ended = False

    def has_moved(self) -> bool:
        """Tell whether any parameter may have changed."""
        return self._ended or versions(self._parameters) != self._before

    def write(self) -> None:
        """Round what has been stepped on into the parameters."""
        if self.rounding is not None:
            self.rounding.write()

    def begin(self, optimizer: Optimizer) -> None:
        """Hear of the end of the step, before any other hook does."""
        hooks = getattr(optimizer, STEP_POST_HOOKS, None)
        if hooks is not None:
            hooks[id(self)] = self._end
            hooks.move_to_end(id(self), last=False)

    def end(self, optimizer: Optimizer) -> None:
        """Take the hook away."""
        hooks = getattr(optimizer, STEP_POST_HOOKS, None)
        if hooks is not None:
            hooks.pop(id(self), None)

    def _end(self, *args: object) -> None:
        self._ended = True
        if self.rounding is not None:
            self.rounding.write()


class Closing:
    """One window on its way through the wrapped optimizer's step."""

    def __init__(
        self, box: Box, proxy: Optimizer, op: str, parameters: list[Tensor], begun: object
    ) -> None:
        self._box, self._proxy, self._op, self._parameters = box, proxy, op, parameters
        self._begun = begun  # what an update of the scaler takes
        self._window, self._stepped_on = box.state.window, parameters
        if not box.target.is_parameters:
            box.target.take_over()
            self._stepped_on = box.target.stepped_on()
        self._before = list(map(grad_of, self._stepped_on))
        self._lent: Sequence[Tensor | None] = self._before
        self._watch = StepWatch(self._stepped_on)
        self._multiplied: Sequence[Tensor] = ()  # in place, by the factor, if `done` says so
        self._factor: Scalar = 1.0
        self._done: list[Any] = []
        self._closed: State | None = None
        self.skip: Scalar = 0.0

    # Before the step

    @not_compiled
    def begin(self) -> bool:
        """Measure the gradient, form it, and put it where the optimizer finds it; whether there is
        a step to take."""
        box, optimizer = self._box, self._box.optimizer
        self._factors = factors = self._measure()
        skip, self._found_inf, fused = factors.skip, factors.found_inf, self._fused
        divisor: Scalar = 1.0
        if isinstance(skip, Tensor) or not skip:
            divisor, norms = self._form(factors, fused)
            if norms:
                skip = self._look_at_rounded(skip, norms, fused)
        self.skip = skip
        if not isinstance(skip, Tensor) and skip:
            self._raise_if_told()
            return False
        if self._formed is not self._grads or not self._window.in_grad:  # else they lie there
            self._lent = self._formed
            for parameter, grad in zip(self._stepped_on, self._lent, strict=True):
                parameter.grad = grad
        if not box.target.is_parameters:
            self._watch.rounding = box.target.rounding(skip)
        if fused:
            scale = None
            if isinstance(divisor, Tensor) or divisor != 1.0:
                scale = as_tensor(divisor, torch.float32, self._device)
            found = skip.float() if isinstance(skip, Tensor) else None
            vars(optimizer).update(grad_scale=scale, found_inf=found)
        self._watch.begin(optimizer)
        return True

    def _measure(self) -> WindowFactors:
        """Norm, finite check, clip coefficient and factor, in at most one read of the gradients."""
        settings, window, parameters = self._box.settings, self._window, self._parameters
        known = window.parameters
        if len(known) != len(parameters) or not all(map(is_, known, parameters)):
            self._window = window = window.of(parameters)
        grads = list(map(grad_of, parameters)) if window.in_grad else window.sums
        tensors: Any = present(grads) if any(map(is_none, grads)) else grads
        self._device = tensors[0].device if tensors else torch.device("cpu")
        wide = not _WIDE.isdisjoint(map(dtype_of, tensors))
        self._norm_dtype = torch.float64 if wide else torch.float32
        self._one_call = fit_one_call(tensors)
        if not self._one_call:  # norms need what lies in several places to be summed
            grads = [None if g is None else coalesced(g) for g in grads]
            tensors = present(grads)
        self._grads = self._formed = grads  # formed: as the optimizer is to see them
        self._tensors: Sequence[Tensor] = tensors  # the gradients that are there
        optimizer = self._box.optimizer
        self._fused = getattr(optimizer, TAKES_SCALE, False) and not any_dtensor(tensors)
        norm, overflow, normalised = None, None, False
        plain = settings.norm_type == 2.0 and self._one_call and bool(tensors)
        if window.norm is not None and settings.norm_type == 2.0 and not window.in_grad:
            norm = window.norm
        elif not plain or (settings.max_norm is None and self._multiplies()):
            norm, overflow = self._read(writes=plain)
            normalised = True
        checks_norm = settings.max_norm is not None or (norm is not None and not normalised)
        retries = [self._read_rescaled] if normalised else [self._read_rescaled, self._read]
        while True:
            factors = window_factors(
                self._device,
                tensors,
                norm,
                normaliser(window, settings.reduction),
                settings.max_norm,
                normalised=normalised,
                checks_norm=checks_norm,  # one that overflowed makes all zero
                overflow=overflow,
                found_inf=window.found_inf,
                finite=window.finite,
            )
            found, skip = factors.norm, factors.skip
            if isinstance(skip, Tensor) and not self._fused:
                skip = 0.0 if skip.is_meta else float(bool(skip))
                factors = factors._replace(skip=skip)
            if isinstance(found, Tensor) and (isinstance(skip, Tensor) or not skip):
                return factors
            if math.isfinite(found) or not retries or (overflow is not None and overflow):
                return factors
            # Powers may have overflowed where those of a multiple of the gradient do not.
            norm, overflow = retries.pop()()
            normalised, checks_norm = True, settings.max_norm is not None

    def _read(self, writes: bool = False) -> tuple[Tensor, Tensor]:
        """The norm of the normalised gradient, and whether it is not finite.

        Args:
            writes: the same pass multiplies by what is known before the norm.
        """
        settings, tensors, flag = self._box.settings, self._tensors, zero_flag(self._device)
        factor = normaliser(self._window, settings.reduction).value()
        finite = isinstance(factor, Tensor) or math.isfinite(factor)  # else all is skipped anyway
        number = to_device(self._device, factor if finite else 1.0)
        if writes:
            self._factor, self._multiplied = factor, tensors
            ops.accumulate_recorded(
                self._done, tensors, tensors, inv_scale=number, found_inf=flag, overwrite=True
            )
            return self._done[0], flag
        return self._norm(settings.norm_type, number, flag), flag

    def _norm(self, norm_type: float, inv_scale: Scalar, flag: Tensor) -> Tensor:
        norm_of = ops.total_norm if self._one_call else global_norm
        return norm_of(self._tensors, norm_type=norm_type, inv_scale=inv_scale, found_inf=flag)

    def _read_rescaled(self) -> tuple[Tensor, Tensor]:
        """The same in float64 where powers of the elements have overflowed: of the gradient over
        its largest element, times that. It reads twice, and the device."""
        settings, flag = self._box.settings, zero_flag(self._device)
        factor = 1.0 if self._done else normaliser(self._window, settings.reduction).value()
        factor = to_device(self._device, factor)
        largest = float(self._norm(math.inf, factor, flag))
        least = torch.finfo(self._norm_dtype).tiny  # a subnormal number would lose digits
        inverse = max(float(factor) / largest, least)
        self._norm_dtype = torch.float64
        norm = self._norm(settings.norm_type, inverse, flag)
        return norm.double() * (float(factor) / inverse), flag

    def _multiplies(self) -> bool:
        """Tell whether to multiply all gradients in place, by what is known before the norm."""
        if getattr(self._box.optimizer, TAKES_SCALE, False) or self._casts():
            return False
        quotient = normaliser(self._window, self._box.settings.reduction)
        if not quotient.on_device:
            factor = quotient.value()
            if isinstance(factor, Tensor) or not math.isfinite(factor) or factor == 1.0:
                return False
        return self._may_write()

    def _casts(self) -> list[int]:
        """Return the indices of sums of another dtype than what is stepped on: float32 for a
        half."""
        grads, stepped_on = self._grads, self._stepped_on
        if self._tensors is grads and all(
            map(is_, map(dtype_of, grads), map(dtype_of, stepped_on))
        ):
            return []
        pairs = enumerate(zip(grads, stepped_on, strict=True))
        return [i for i, (grad, p) in pairs if grad is not None and grad.dtype != p.dtype]

    def _may_write(self) -> bool:
        """Tell whether the gradients may be multiplied in place. The sums are the window's own; a
        tensor in `.grad` may share memory, be of inference mode, or be computed as it is read."""
        if not self._window.in_grad:
            return True
        parts = local_tensors(self._tensors)
        for apart in (Tensor.is_inference, Tensor.is_neg, Tensor.is_conj):
            if any(map(apart, parts)):
                return False
        return not memory_overlap.any_shared(parts)

    def _form(self, factors: WindowFactors, fused: bool) -> tuple[Scalar, Sequence[Tensor]]:
        """Multiply the gradients: in place, in new memory where they are cast or may not be
        written, or by leaving it to the optimizer.

        Returns:
            The remaining divisor, and the norms of gradients that were rounded to half precision.
        """
        factor, casts, tensors = factors.factor, self._casts(), self._tensors
        one = not isinstance(factor, Tensor) and factor == 1.0
        if self._done or (one and not casts):
            return 1.0, ()
        # A fused kernel divides by a float32 and writes the quotients back.
        dense = self._one_call or not any(grad.is_sparse for grad in tensors)
        folds = fused and dense and not casts and self._norm_dtype == torch.float32
        everything = self._window.in_grad and not self._may_write()
        if folds and not everything:
            inverse = factors.inverse
            return divide(1.0, factor) if inverse is None else inverse, ()
        norms: list[Tensor] = []
        if casts or everything:
            grads: list[Any] = list(self._grads)
            self._formed = grads
            rest = [i for i, g in enumerate(grads) if g is not None and i not in set(casts)]
            for indices in (casts, rest if everything else []):
                dtypes = [self._stepped_on[i].dtype for i in indices]
                made, found = products([grads[i] for i in indices], dtypes, factor)
                norms += found if indices is casts else []
                for i, product in zip(indices, made, strict=True):
                    grads[i] = product
            tensors = [] if everything else [grads[i] for i in rest]
        if not one:
            self._factor, self._multiplied = factor, tensors
            if self._one_call and not isinstance(factor, Tensor):
                # The kernel and word of it in one, as signals see it.
                torch.autograd.graph.increment_version(tensors)
                self._done.extend(map(partial(ops.SCALE, tensors), (factor,)))
            else:
                multiply(self._done, tensors, factor)
        return 1.0, norms

    def _raise_if_told(self) -> None:
        """Raise for a sum, or its norm, that is not finite, though each micro-batch was."""
        if self._box.settings.on_nonfinite == "raise":
            names = named(self._names_of(nonfinite(present(self._formed))))
            got = f"inf or NaN in {names}" if names else "a norm that is not"
            advice = "Call opt.discard() to drop the window"
            raise RuntimeError(message(self._op, "the window's sum", "be finite", got, advice))

    def _look_at_rounded(self, skip: Scalar, norms: Sequence[Tensor], fused: bool) -> Scalar:
        """Skip, too, where a norm is not finite: rounding to half precision has overflowed."""
        for norm in norms:
            skip, self._found_inf = (
                window_factors(
                    norm.device, [], norm, Normaliser(), checks_norm=True, found_inf=flag
                ).found_inf
                for flag in (skip, self._found_inf)
            )
        if isinstance(skip, Tensor) and not fused:
            return 0.0 if skip.is_meta else float(bool(skip))
        return skip

    # After the step

    @not_compiled
    def finish(self) -> None:
        """Close the window. May be called twice."""
        box, window, state = self._box, self._window, self._box.state
        self._take_back()
        if self._watch.rounding is not None:
            self._watch.write()
        used = state.used
        if window.in_grad:
            made = list(map(is_, self._before, window.sums))
            used = used.after(grads_of(self._parameters), made)
        box.state = self._closed = state._replace(
            window=NO_WINDOW, used=used, last=self._report(), stepped=True, accumulated=False
        )
        if box.sharded is not None:
            box.sharded.idle = True
        if box.settings.scaler is not None:
            update(box.settings.scaler, self._begun, self._proxy, self._found_inf, self._device)

    @not_compiled
    def recover(self) -> bool:
        """After an exception: finish if the step has been taken, else leave all as it was. Returns
        whether it has."""
        closed = self._closed is not None and self._box.state is self._closed
        if closed or self._watch.has_moved():
            self.finish()
            return True
        self._take_back()
        put(self._stepped_on, self._before)  # also what the step has taken away
        self._box.warned.add("full")  # which the window is, and another micro-batch may join it
        state, in_grad = self._box.state, self._window.in_grad
        if self._done:  # the same gradient, up to a rounding
            between = versions(self._grads)
            multiply([], self._multiplied, divide(1.0, self._factor))
            if in_grad:
                used = state.used.after_writes(self._grads, between)
                self._box.state = state = state._replace(used=used)
        if in_grad and not self._window.sums:  # the user's own, as before
            self._box.state = state._replace(window=NO_WINDOW)
        return False

    def _take_back(self) -> None:
        """Leave nothing on the optimizer, and what there was in `.grad`."""
        optimizer = self._box.optimizer
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        self._watch.end(optimizer)
        if self._lent is self._before:
            return
        for parameter, lent, grad in zip(self._stepped_on, self._lent, self._before, strict=True):
            # What was lent, or what the step has put in its place; but not where it has cleared it.
            if lent is None or parameter.grad is not None:
                parameter.grad = grad

    def _report(self) -> WindowReport:
        window, skip, factors = self._window, self.skip, self._factors
        count = window.micro_batches if window.finite is None else window.finite
        report = WindowReport(
            skip,
            factors.norm,
            factors.clip_coef,
            window.loss_scale,
            window.weight,
            count if window.world is None else window.world,
            self._norm_dtype,
            self._device,
            window.unchecked,
        )
        if isinstance(skip, Tensor) or skip or window.dropped:
            self._name_culprits(report)
        return report

    def _name_culprits(self, report: WindowReport) -> None:
        """Tell which parameters had an inf or NaN, or let it be found when somebody asks."""
        if isinstance(self.skip, Tensor):
            report.evidence = self._tensors, self._names_of
            return
        found = self._names_of(nonfinite(present(self._formed))) if self.skip else []
        names = self._box.names()
        dropped = {names[parameter] for parameter in self._window.dropped}
        report.name([names[p] for p in self._parameters if names[p] in dropped.union(found)])

    def _names_of(self, indices: Sequence[int]) -> list[Name]:
        """The names of parameters by index among those that have a gradient."""
        pairs = zip(self._parameters, self._grads, strict=True)
        there = [parameter for parameter, grad in pairs if grad is not None]
        known = self._box.names() if indices else {}
        return [known[there[i]] for i in indices]
