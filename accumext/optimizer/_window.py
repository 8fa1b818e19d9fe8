"""The open window: the main gradients, the unit they are kept in, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import cached_property
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext import _scalars, ops
from accumext._checks import Reduction
from accumext._scalars import Scalar, divide, to_device, to_host_if_free
from accumext._tensor_kinds import (
    any_dtensor,
    coalesced,
    dense_storage,
    fit_one_call,
    group_by_device,
    main_dtype,
    nonfinite,
    scale_,
    zero_flag,
    zeros_like,
)
from accumext._torch_private import sparse_values
from accumext.optimizer._grad_ownership import is_narrow, take_ownership, widened
from accumext.optimizer._grad_slots import AttachedGrads, GradSlots, clear, is_none
from accumext.optimizer._loss_scaling import UNSCALED, LossScale
from accumext.optimizer._window_factors import Normaliser

_dtype_of = attrgetter("dtype")


class MainGrads:
    """One tensor per parameter that received a gradient, in the order of the parameters.

    Their values change, but not which tensors they are, so what is asked of them is asked once.
    """

    def __init__(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.tensors = list(tensors)

    @classmethod
    def of(cls, by_parameter: dict[Tensor, Tensor]) -> MainGrads:
        """From main gradients by parameter."""
        grads = cls(list(by_parameter), list(by_parameter.values()))
        grads.by_parameter = by_parameter
        return grads

    @cached_property
    def by_parameter(self) -> dict[Tensor, Tensor]:
        """The main gradient of each parameter that has one."""
        return dict(zip(self.parameters, self.tensors, strict=True))

    @cached_property
    def one_call(self) -> bool:
        """Whether one call of an operator takes them all as they are."""
        return fit_one_call(self.tensors)

    @cached_property
    def sharded(self) -> bool:
        """Whether any is only one process's part."""
        return not self.one_call and any_dtensor(self.tensors)

    @cached_property
    def dense(self) -> bool:
        """Whether none is sparse."""
        return self.one_call or not any(main.is_sparse for main in self.tensors)

    @cached_property
    def casts(self) -> dict[Tensor, Tensor]:
        """Those of another dtype than their parameter: float32 for one of half precision."""
        if list(map(_dtype_of, self.parameters)) == list(map(_dtype_of, self.tensors)):
            return {}
        pairs = zip(self.parameters, self.tensors, strict=True)
        return {p: main for p, main in pairs if main.dtype != p.dtype}

    def without(self, others: dict[Tensor, Tensor]) -> MainGrads:
        """All but those of some parameters."""
        return MainGrads.of({p: m for p, m in self.by_parameter.items() if p not in others})

    def lend(self) -> None:
        """Put them into `.grad`."""
        for parameter, main in zip(self.parameters, self.tensors, strict=True):
            parameter.grad = main


_NONE = MainGrads([], [])


class Writing(NamedTuple):
    """Kernels that are writing main gradients now."""

    norms: list[Tensor]  # one from each that has run
    result: Callable[[], Window]  # the window once they have run


class Window:
    """`main[p] = unit_scale.value / unit_weight * sum(weight_i * grad_i)` over its micro-batches.

    The unit is that of the first micro-batch, so its gradients join as they are; each later
    micro-batch is brought to the unit with its own scale and weight.

    A micro-batch is added as a whole or not at all: everything is prepared on a draft, then kernels
    write the main gradients, and the draft becomes the window.
    """

    def __init__(self) -> None:
        self.main_grads = _NONE
        self.in_order = True  # the parameters came in the order in which the optimizer has them
        self.attached: AttachedGrads | None = None  # while `.grad` holds the main gradients
        self.micro_batches = 0
        self.weight: Scalar = 0.0
        self.unit_weight: Scalar | None = None  # None while every weight was the number zero
        self.unit_scale = UNSCALED
        self.loss_scale: Scalar = 1.0  # of the latest micro-batch
        self.found_infs: dict[torch.device, Tensor] = {}  # of what came in, one per device
        self.norm: Tensor | None = None  # 2-norm of the main gradients, if the last pass found it
        self.finite_micro_batches: Scalar | None = None  # where the others are dropped
        self.world_micro_batches: Scalar | None = None  # of all processes, once they are summed
        self.agreed = False  # the weight is that of all shards
        self.dropped: list[Tensor] = []  # parameters that had a gradient dropped, if known here
        self.held_back = False  # gradients of a model that did not synchronise them
        self.unchecked = False  # attached, and to be dropped if not finite
        self.writing: Writing | None = None
        self.writes = 0  # how often main gradients were written or exchanged for good

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, whose parameters come without `.grad`: main gradients of its own."""
        window = self.detached_copy()
        # A key means something in one process only.
        return {**vars(window), "unit_scale": LossScale(window.unit_scale.value)}

    def _draft(self) -> Window:
        """The same window in an object of its own, to be changed without being seen."""
        draft = Window.__new__(Window)
        vars(draft).update(vars(self), writes=self.writes + 1, writing=None)
        return draft

    def _become(self, draft: Window) -> None:
        vars(self).update(vars(draft))

    @property
    def by_parameter(self) -> dict[Tensor, Tensor]:
        """The main gradients by parameter, to read."""
        return self.main_grads.by_parameter

    def holds(self, parameters: Collection[Tensor]) -> bool:
        """Whether these are the parameters of the main gradients, in this order."""
        holders = self.main_grads.parameters
        return len(holders) == len(parameters) and all(map(is_, holders, parameters))

    def replace(self, main_grads: dict[Tensor, Tensor]) -> None:
        """Set the main gradients, of which nothing is known then."""
        self.main_grads, self.norm = MainGrads.of(main_grads), None

    # The unit

    def factor(self, weight: Scalar, scale: LossScale) -> Scalar:
        """What brings a micro-batch to the unit; the host number 1.0 where nothing has to."""
        if self.unit_weight is None:
            return 1.0
        if scale.weight_unit is None:
            relative = weight / self.unit_weight
        elif scale.weight_unit is self.unit_weight:
            relative = 1.0
        else:
            relative = scale.weight_unit / self.unit_weight
        unit = self.unit_scale
        if scale.key is not None and scale.key == unit.key:
            return relative
        known_both = not isinstance(scale.value, Tensor) and not isinstance(unit.value, Tensor)
        if known_both and scale.value == unit.value:  # also where both are zero
            return relative
        return relative * divide(unit.value, scale.value)

    def count_in(self, weight: Scalar, scale: LossScale) -> Scalar:
        """Count a micro-batch, let the first one set the unit, and return its factor."""
        factor = self.factor(weight, scale)
        if scale.weight_unit is not None:  # on other processes the weight may not be zero
            if self.unit_weight is None:
                self.unit_weight, self.unit_scale = scale.weight_unit, scale
        elif isinstance(weight, Tensor):
            if self.unit_weight is None:  # which divides, and must not be a zero of the device
                self.unit_weight, self.unit_scale = torch.where(weight > 0, weight, 1.0), scale
                factor = (weight > 0).double()
        elif weight == 0.0:
            factor = 0.0
        elif self.unit_weight is None:
            self.unit_weight, self.unit_scale = weight, scale
        self.micro_batches += 1
        self.weight = self.weight + weight
        self.loss_scale = scale.value
        self.agreed = False  # after a step that failed it holds the mean of what was there then
        return factor

    def normaliser(self, reduction: Reduction) -> Normaliser:
        """What makes the window's gradient of the main gradients; finite also for a zero weight."""
        unit = 1.0 if self.unit_weight is None else self.unit_weight
        scale = self.unit_scale.value
        if reduction == "sum":
            return Normaliser(unit, None, scale)
        if isinstance(self.weight, Tensor):
            return Normaliser(unit, self.weight, scale)
        return Normaliser(unit / (self.weight or unit), None, scale)

    # Adding a micro-batch

    def add(
        self,
        slots: GradSlots,
        weight: Scalar,
        scale: LossScale,
        foreign: Container[int] | None,  # ids of gradients that somebody else holds; None: all
    ) -> None:
        """Add the gradients of one micro-batch, or after an exception none of them."""
        draft = self._draft()
        factor = draft.count_in(weight, scale)
        main_grads = self.main_grads
        if (
            (isinstance(factor, Tensor) or factor != 0.0)
            and main_grads.tensors
            and self.holds(slots.parameters)
            and main_grads.one_call
            and not any(map(is_none, slots.grads))
            and fit_one_call([main_grads.tensors[0], *slots.grads])  # type: ignore[list-item]
        ):  # nearly always: without a loop in Python
            self._write_in_one_call(draft, slots.grads, factor)  # type: ignore[arg-type]
        else:
            self._add(draft, slots.present(), factor, foreign)

    def add_partial(
        self, grads: dict[Tensor, Tensor], factor: Scalar, foreign: Container[int] | None
    ) -> None:
        """Add some gradients of a micro-batch that is counted already."""
        self._add(self._draft(), grads, factor, foreign)
        self.norm = None  # which depends on the order of the parts

    def _add(
        self,
        draft: Window,
        grads: dict[Tensor, Tensor],
        factor: Scalar,
        foreign: Container[int] | None,
    ) -> None:
        """Become the draft plus these gradients. A parameter's first one is its main gradient."""
        counts = isinstance(factor, Tensor) or factor != 0.0
        first: dict[Tensor, Tensor] = {}
        sparse: dict[Tensor, Tensor] = {}
        main_grads: list[Tensor] = []
        addends: list[Tensor] = []
        before = self.by_parameter
        for parameter, grad in grads.items():
            main = before.get(parameter)
            if main is None:
                # What counts for nothing may hold NaN, the mean of nothing.
                first[parameter] = grad if counts else zeros_like(grad)
            elif not counts:
                continue
            elif grad.is_sparse or main.is_sparse:
                grad = grad.to(main.dtype) * factor
                sparse[parameter] = grad + main if main.is_sparse else main + grad
            else:
                main_grads.append(main)
                addends.append(grad)
        scaled: list[Tensor] = []
        if first or sparse:
            narrow = {p: grad for p, grad in first.items() if is_narrow(p, grad)}
            wide, norm = widened(narrow, factor if counts else 1.0, draft.found_inf_on)
            others = {p: grad for p, grad in first.items() if p not in narrow}
            owned = take_ownership(others, foreign) | wide
            if counts and (isinstance(factor, Tensor) or factor != 1.0):
                scaled = [owned[p] for p in others]
            draft.in_order = draft.in_order and not (first and before)
            draft.replace(before | sparse | {p: owned[p] for p in first})
            if len(wide) == len(draft.main_grads.tensors) and not draft.main_grads.sharded:
                draft.norm = norm
        self._write(draft, scaled, main_grads, addends, factor)

    def _write(
        self,
        draft: Window,
        scaled: list[Tensor],
        main_grads: list[Tensor],
        addends: list[Tensor],
        factor: Scalar,
    ) -> None:
        """Become the draft, with `scaled *= factor` and `main += addend * factor` in it."""
        calls = group_by_device(main_grads, addends)
        factors = [to_device(device, factor) for device, _ in calls]
        flags = [draft.found_inf_on(device) for device, _ in calls]
        whole = len(main_grads) == len(draft.main_grads.tensors) and not self.main_grads.sharded
        norms: list[Tensor] = []

        def result() -> Window:
            if norms:
                draft.norm = norms[0] if whole and len(norms) == 1 else None
            return draft

        self.writing = Writing(norms, result)
        scale_(scaled, factor)
        for (_, lists), number, flag in zip(calls, factors, flags, strict=True):
            ops.accumulate_recorded(norms, *lists, inv_scale=number, found_inf=flag)
        self._become(result())

    def _write_in_one_call(self, draft: Window, addends: list[Tensor], factor: Scalar) -> None:
        """Become the draft, with `main += addend * factor` for all main gradients at once."""
        main_grads = self.main_grads.tensors
        device = main_grads[0].device
        if isinstance(factor, Tensor):
            factor = to_device(device, factor)
        flag = draft.found_inf_on(device)
        norms: list[Tensor] = []

        def result() -> Window:
            draft.norm = norms[0]
            return draft

        self.writing = Writing(norms, result)
        ops.accumulate_recorded(norms, main_grads, addends, inv_scale=factor, found_inf=flag)
        self._become(result())

    def complete(self) -> None:
        """After an exception: become what was written, if anything was."""
        if self.writing is not None and self.writing.norms:
            self._become(self.writing.result())

    def add_if_finite(self, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> None:
        """Add one micro-batch if all of it is finite; else leave the sums bit for bit.

        The unit is 1, so that no dropped micro-batch can show in the sum of the others.
        """
        if not isinstance(weight, Tensor) and weight == 0.0:  # counts for nothing, finite or not
            grads = {p: zeros_like(grad) for p, grad in grads.items()}
        found_inf = zero_flag(next(iter(grads.values())).device if grads else None)
        draft = self._draft()
        if draft.finite_micro_batches is None:
            draft.finite_micro_batches = float(self.micro_batches)
        if draft.unit_weight is None:
            draft.unit_weight = 1.0
        main_grads = dict(self.by_parameter)
        in_order = self.in_order and (not main_grads or grads.keys() <= main_grads.keys())
        for p, g in grads.items():
            if p not in main_grads:
                main_grads[p] = torch.zeros_like(g, dtype=main_dtype(p))
            elif main_grads[p].is_sparse and not g.is_sparse:
                main_grads[p] = main_grads[p].to_dense()
        incoming = {p: g.coalesce() if g.is_sparse else g for p, g in grads.items()}
        addends = {  # what a sparse gradient adds is formed apart and joined below
            p: g.to(main_dtype(p), copy=True) for p, g in incoming.items() if g.is_sparse
        }
        for addend in addends.values():
            sparse_values(addend).zero_()
        factor = draft.factor(weight, scale)
        lists = (
            [dense_storage(addends.get(p, main_grads[p])) for p in incoming],
            [dense_storage(grad) for grad in incoming.values()],
        )
        draft.micro_batches += 1
        draft.loss_scale = scale.value
        draft.found_inf_on(found_inf.device)  # what joins later may not have to make it
        norms: list[Tensor] = []

        def result() -> Window:
            joined = draft._draft()
            joined._join(main_grads, addends, found_inf, weight, grads, in_order)
            return joined

        self.writing = Writing(norms, result)
        ops.accumulate_recorded(
            norms,
            *lists,
            inv_scale=to_device(found_inf.device, factor),
            found_inf=found_inf,
            if_finite=True,
        )
        self._become(result())

    def _join(
        self,
        main_grads: dict[Tensor, Tensor],
        addends: dict[Tensor, Tensor],
        found_inf: Tensor,
        weight: Scalar,
        grads: dict[Tensor, Tensor],
        in_order: bool,
    ) -> None:
        """Count a micro-batch that was added if it was finite."""
        self.note_found_inf(found_inf)
        if _scalars.on_host(found_inf) and bool(found_inf):
            self.dropped = self.dropped + nonfinite(grads)
            return
        kept = 1.0 - to_host_if_free(found_inf)
        self.in_order = in_order
        self.replace(main_grads | {p: main_grads[p] + addend for p, addend in addends.items()})
        assert self.finite_micro_batches is not None
        self.finite_micro_batches = self.finite_micro_batches + kept
        self.weight = self.weight + weight * kept

    # Main gradients in `.grad`

    def attach(
        self, slots: GradSlots, weight: Scalar, scale: LossScale, *, unchecked: bool, produced: bool
    ) -> None:
        """Add the first micro-batch and leave it in `.grad`, as the main gradients.

        Args:
            unchecked: it is to be dropped if it is not finite, should another one come.
            produced: by the wrapper's own backward pass.
        """
        draft = self._draft()
        draft.writes = self.writes  # none: this can be undone
        factor = draft.count_in(weight, scale)
        parameters, grads = slots
        there = [grad for grad in grads if grad is not None]
        holders = parameters
        if len(there) < len(grads):
            holders = [p for p, g in zip(parameters, grads, strict=True) if g is not None]
        if not isinstance(factor, Tensor) and factor == 0.0:
            there = [zeros_like(grad) for grad in there]
        draft.main_grads = MainGrads(holders, there)
        if isinstance(factor, Tensor):  # 0 or 1, which only the device knows
            scale_(there, factor, draft.main_grads.one_call)
        elif factor == 0.0:
            draft.main_grads.lend()
            grads = GradSlots.of(parameters).grads
        draft.attached = AttachedGrads(parameters, grads, produced)
        draft.unchecked = unchecked
        self._become(draft)

    def refresh(self) -> None:
        """Read the main gradients from `.grad` again, while they are there."""
        if self.attached is not None:
            self.replace({p: p.grad for p in self.attached.parameters if p.grad is not None})

    def detached_copy(self) -> Window:
        """This window as it is without `.grad`, in an object of its own."""
        draft = self._draft()
        draft.writes = self.writes  # only copies are written: this can be undone
        if self.attached is None:
            return draft
        draft.refresh()
        draft.attached, draft.unchecked = None, False
        if not self.unchecked:  # the user may have looked at the gradients, and hold them
            draft.replace(take_ownership(draft.by_parameter, None))
            return draft
        checked = Window()
        checked.add_if_finite(draft.by_parameter, self.weight, self.unit_scale)
        checked.held_back, checked.writes = self.held_back, self.writes
        checked.loss_scale = self.loss_scale  # of a micro-batch of weight 0 too
        return checked

    def detach(self) -> None:
        """Take the main gradients out of `.grad`."""
        if self.attached is not None:
            parameters, draft = self.attached.parameters, self.detached_copy()
            clear(parameters)
            self._become(draft)

    def adopt(self, slots: GradSlots) -> None:
        """Take the main gradients from `.grad`, where autograd has added a micro-batch to them."""
        self.norm = None
        parameters, grads = slots
        tensors = self.main_grads.tensors
        if len(grads) == len(tensors) and all(map(is_, grads, tensors)):
            return
        main_grads = self.by_parameter
        pairs = zip(parameters, grads, strict=True)
        others = {p: g for p, g in pairs if g is not None and g is not main_grads.get(p)}
        self.in_order = self.in_order and others.keys() <= main_grads.keys()
        self.replace(main_grads | take_ownership(others, None))

    def zeros_for(self, parameter: Tensor) -> Tensor | None:
        """The main gradient of a parameter, of zeros where it had none, for others to add to.

        None for one that is not a dense tensor of its own.
        """
        self.norm = None
        main = self.by_parameter.get(parameter)
        if main is None:
            main = torch.zeros_like(parameter, dtype=main_dtype(parameter))
            self.in_order = self.in_order and not self.by_parameter
            self.replace(self.by_parameter | {parameter: main})
        return main if fit_one_call([main]) else None

    # What a step asks

    def sort(self, parameters: Iterable[Tensor]) -> None:
        """Bring the main gradients into the order of the parameters: their norm depends on it."""
        if not self.in_order:
            main_grads = self.by_parameter
            self.main_grads = MainGrads.of(
                {p: main_grads[p] for p in parameters if p in main_grads}
            )
            self.in_order = True

    def coalesce(self) -> None:
        """Sum what sparse and sharded main gradients hold in several places, as norms need it."""
        if not self.main_grads.one_call:
            main_grads = self.by_parameter
            others = {p: whole for p, m in main_grads.items() if (whole := coalesced(m)) is not m}
            if others:
                self.replace(main_grads | others)

    def counted(self) -> Scalar | int:
        """How many micro-batches are in the sum."""
        if self.world_micro_batches is not None:
            return self.world_micro_batches
        finite = self.finite_micro_batches
        return self.micro_batches if finite is None else finite

    def note_found_inf(self, found_inf: Tensor) -> None:
        """Remember a found_inf that somebody else formed; any value but zero counts."""
        flag = self.found_inf_on(found_inf.device).masked_fill(found_inf != 0, 1.0)
        self.found_infs = {**self.found_infs, found_inf.device: flag}

    def found_inf_on(self, device: torch.device) -> Tensor:
        """The found_inf of this window on a device."""
        if device not in self.found_infs:
            flag = torch.zeros((), dtype=torch.float32, device=device)
            self.found_infs = {**self.found_infs, device: flag}
        return self.found_infs[device]
