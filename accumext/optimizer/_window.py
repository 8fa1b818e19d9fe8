"""The open window: the main gradients, the unit they are kept in, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext._scalars import Scalar, any_of, known, on, on_host, quotient
from accumext._tensor_kinds import (
    are_plain,
    is_sparse,
    main_dtype,
    nonfinite,
    per_device,
    plain,
    scale_,
    settled,
    zero_flag,
    zeros_like,
)
from accumext.optimizer._grad_slots import Attachment, clear, param_grads
from accumext.optimizer._main_grads import MainGrads, take_ownership


class LossScale(NamedTuple):
    """What a loss was multiplied with; equal keys mean equal values, None says nothing."""

    value: Scalar = 1.0
    key: tuple[int, int] | None = None  # for a value that only the device knows


UNSCALED = LossScale()


class Writing(NamedTuple):
    """Kernels that write main gradients at this moment."""

    norms: list[Tensor]  # from those that have
    written: Callable[[], Window]  # the window then


class Window:
    """`main[p] = unit_scale.value / unit_weight * sum(weight_i * grad_i)` over what was taken in.

    The unit is that of the first micro-batch, so its gradients join as they are; each later
    micro-batch is brought to the unit with its own scale and weight.

    A micro-batch is taken in as a whole or not at all: everything is prepared on a draft, then
    kernels write the main gradients, and the draft becomes the window.
    """

    def __init__(self) -> None:
        self.mains = MainGrads([], [])
        self.in_order = True  # the parameters came in the order in which the optimizer has them
        self.attachment: Attachment | None = None  # while the main gradients lie in `.grad`
        self.micro_batches = 0
        self.weight: Scalar = 0.0
        self.unit_weight: Scalar | None = None  # None while every weight was the number zero
        self.unit_scale = UNSCALED
        self.loss_scale: Scalar = 1.0  # of the latest micro-batch
        self.flags: dict[torch.device, Tensor] = {}  # found_inf of what came in, one per device
        self.norm: Tensor | None = None  # the 2-norm of `main` where the last pass found it
        self.survivors: Scalar | None = None  # micro-batches kept, once bad ones are dropped
        self.gathered: Scalar | None = None  # micro-batches of all processes, once reduced
        self.dropped: list[Tensor] = []  # parameters that had them dropped, where the host knows
        self.held_back = False  # a model's synchronisation: to be summed over its processes
        self.unchecked = False  # in `.grad`, and not to be taken in if it is not finite
        self.writing: Writing | None = None  # while kernels write main gradients
        self.writes = 0  # how often main gradients were written or exchanged for good

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, whose parameters come without `.grad`: the main gradients on their own."""
        window = self.apart()
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
    def main(self) -> dict[Tensor, Tensor]:
        """The main gradients by parameter, to read."""
        return self.mains.by_parameter

    def holds(self, parameters: Collection[Tensor]) -> bool:
        """Whether these are the parameters of the main gradients, in this order."""
        holders = self.mains.parameters
        return len(holders) == len(parameters) and all(map(is_, holders, parameters))

    def replace(self, mains: dict[Tensor, Tensor]) -> None:
        """Set the main gradients, of which nothing is known then."""
        self.mains, self.norm = MainGrads.of(mains), None

    def factor(self, weight: Scalar, scale: LossScale) -> Scalar:
        """What brings a micro-batch to the unit; the host number 1.0 where nothing has to."""
        if self.unit_weight is None:
            return 1.0
        relative = weight / self.unit_weight
        unit = self.unit_scale
        if scale.key is not None and scale.key == unit.key:
            return relative
        known_both = not isinstance(scale.value, Tensor) and not isinstance(unit.value, Tensor)
        if known_both and scale.value == unit.value:  # also where both are zero
            return relative
        return relative * quotient(unit.value, scale.value)

    def count(self, weight: Scalar, scale: LossScale) -> Scalar:
        """Count a micro-batch in, let the first one set the unit, and return its factor."""
        factor = self.factor(weight, scale)
        if isinstance(weight, Tensor):
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
        return factor

    def take(
        self,
        grads: dict[Tensor, Tensor],
        weight: Scalar,
        scale: LossScale,
        foreign: Container[int] | None,  # ids of gradients that somebody else holds; None: all
    ) -> None:
        """Take in one micro-batch, or after an exception nothing of it."""
        draft = self._draft()
        self._add(draft, grads, draft.count(weight, scale), foreign)

    def take_part(
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
        fresh: dict[Tensor, Tensor] = {}
        sparse: dict[Tensor, Tensor] = {}
        mains: list[Tensor] = []
        addends: list[Tensor] = []
        before = self.main
        alike = counts and self.holds(grads) and self.mains.dense
        if alike and not any(map(is_sparse, grads.values())):  # nearly always: without the loop
            mains, addends, grads = self.mains.tensors, list(grads.values()), {}
        for parameter, grad in grads.items():
            main = before.get(parameter)
            if main is None:
                # What counts for nothing may hold NaN, the mean of nothing.
                fresh[parameter] = grad if counts else zeros_like(grad)
            elif not counts:
                continue
            elif grad.is_sparse or main.is_sparse:
                grad = grad.to(main.dtype) * factor
                sparse[parameter] = grad + main if main.is_sparse else main + grad
            else:
                mains.append(main)
                addends.append(grad)
        taken: list[Tensor] = []
        if fresh or sparse:
            owned = take_ownership(fresh, foreign)
            if counts and (isinstance(factor, Tensor) or factor != 1.0):
                taken = list(owned.values())
            draft.in_order = draft.in_order and not (fresh and before)
            draft.replace(before | sparse | owned)
        self._write(draft, taken, mains, addends, factor)

    def _write(
        self,
        draft: Window,
        taken: list[Tensor],
        mains: list[Tensor],
        addends: list[Tensor],
        factor: Scalar,
    ) -> None:
        """Become the draft, with `taken *= factor` and `main += addend * factor` in it."""
        plain_already = self.mains.plain and bool(mains) and are_plain([mains[0], *addends])
        calls = list(per_device(mains, addends, plain_already=plain_already))
        factors = [on(device, factor) for device, _ in calls]
        flags = [draft.flag(device) for device, _ in calls]
        whole = len(mains) == len(draft.mains.tensors) and not self.mains.sharded
        norms: list[Tensor] = []

        def written() -> Window:
            if norms:
                draft.norm = norms[0] if whole and len(norms) == 1 else None
            return draft

        self.writing = Writing(norms, written)
        scale_(taken, factor)
        for (_, lists), number, flag in zip(calls, factors, flags, strict=True):
            ops.accumulate_recorded(norms, *lists, inv_scale=number, found_inf=flag)
        self._become(written())

    def complete(self) -> None:
        """After an exception: become what was written, if anything was."""
        if self.writing is not None and self.writing.norms:
            self._become(self.writing.written())

    def destination(self, parameter: Tensor) -> Tensor | None:
        """The main gradient, of zeros where there was none, for somebody to add a gradient to."""
        main = self.main.get(parameter)
        if main is None:
            main = torch.zeros_like(parameter, dtype=main_dtype(parameter))
            self.in_order = self.in_order and not self.main
            self.replace(self.main | {parameter: main})
        self.norm = None
        return main if are_plain([main]) else None

    def attach(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor | None],  # of each parameter
        weight: Scalar,
        scale: LossScale,
        *,
        unchecked: bool,
        brought: bool,
    ) -> None:
        """Take in the first micro-batch and leave it in `.grad`.

        Args:
            unchecked: it is to be dropped if it is not finite, should another one come.
            brought: by the wrapper's own backward pass.
        """
        draft = self._draft()
        draft.writes = self.writes  # none: this can be undone
        factor = draft.count(weight, scale)
        there = [grad for grad in grads if grad is not None]
        holders = parameters
        if len(there) < len(grads):
            holders = [p for p, g in zip(parameters, grads, strict=True) if g is not None]
        if not isinstance(factor, Tensor) and factor == 0.0:
            there = [zeros_like(grad) for grad in there]
        draft.mains = MainGrads(holders, there)
        if isinstance(factor, Tensor):  # 0 or 1, which only the device knows
            scale_(there, factor, draft.mains.plain)
        elif factor == 0.0:
            draft.mains.lend()
            grads = param_grads(parameters)
        draft.attachment = Attachment(parameters, grads, brought)
        draft.unchecked = unchecked
        self._become(draft)

    @property
    def attached(self) -> bool:
        """Whether the main gradients are the tensors in `.grad`."""
        return self.attachment is not None

    def refresh(self) -> None:
        """While the main gradients lie in `.grad`, they are whatever lies there."""
        if self.attachment is not None:
            self.replace({p: p.grad for p in self.attachment.parameters if p.grad is not None})

    def apart(self) -> Window:
        """This window as it is without `.grad`, in an object of its own."""
        draft = self._draft()
        draft.writes = self.writes  # only copies are written: this can be undone
        if self.attachment is None:
            return draft
        draft.refresh()
        draft.attachment, draft.unchecked = None, False
        if not self.unchecked:
            draft.replace(
                take_ownership(draft.main, None)
            )  # the user may have looked at them, and hold them
            return draft
        checked = Window()
        checked.take_if_finite(draft.main, self.weight, self.unit_scale)
        checked.held_back, checked.writes = self.held_back, self.writes
        checked.loss_scale = self.loss_scale  # of a micro-batch of weight 0 too
        return checked

    def detach(self) -> None:
        """Take the main gradients out of `.grad`."""
        if self.attachment is None:
            return
        parameters, draft = self.attachment.parameters, self.apart()
        clear(parameters)
        self._become(draft)

    def take_back(self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """The main gradients are what lies in `.grad`, where autograd added a micro-batch to it."""
        self.norm = None
        if len(grads) == len(self.mains.tensors) and all(map(is_, grads, self.mains.tensors)):
            return
        pairs = zip(parameters, grads, strict=True)
        others = {p: g for p, g in pairs if g is not None and g is not self.main.get(p)}
        self.in_order = self.in_order and others.keys() <= self.main.keys()
        self.replace(self.main | take_ownership(others, None))

    def arrange(self, parameters: Iterable[Tensor]) -> None:
        """Bring the main gradients into the order of the parameters: their norm depends on it."""
        if not self.in_order:
            self.mains = MainGrads.of({p: self.main[p] for p in parameters if p in self.main})
            self.in_order = True

    def take_if_finite(self, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> None:
        """Take in one micro-batch if all of it is finite; else leave the sums bit for bit.

        The unit is 1, so that no dropped micro-batch can show in the sum of the others.
        """
        if not isinstance(weight, Tensor) and weight == 0.0:  # counts for nothing, finite or not
            grads = {p: zeros_like(grad) for p, grad in grads.items()}
        found_inf = zero_flag(next(iter(grads.values())).device if grads else None)
        draft = self._draft()
        if draft.survivors is None:
            draft.survivors = float(self.micro_batches)
        if draft.unit_weight is None:
            draft.unit_weight = 1.0
        mains = dict(self.main)
        in_order = self.in_order and (not mains or grads.keys() <= mains.keys())
        for p, g in grads.items():
            if p not in mains:
                mains[p] = torch.zeros_like(g, dtype=main_dtype(p))
            elif mains[p].is_sparse and not g.is_sparse:
                mains[p] = mains[p].to_dense()
        incoming = {p: g.coalesce() if g.is_sparse else g for p, g in grads.items()}
        addends = {  # what a sparse gradient adds is formed apart and joined below
            p: g.to(main_dtype(p), copy=True) for p, g in incoming.items() if g.is_sparse
        }
        for addend in addends.values():
            addend._values().zero_()
        factor = draft.factor(weight, scale)
        lists = (
            [plain(addends.get(p, mains[p])) for p in incoming],
            [plain(grad) for grad in incoming.values()],
        )
        draft.micro_batches += 1
        draft.loss_scale = scale.value
        draft.flag(found_inf.device)  # what joins later may not have to make it
        norms: list[Tensor] = []

        def written() -> Window:
            joined = draft._draft()
            joined._join(mains, addends, found_inf, weight, grads, in_order)
            return joined

        self.writing = Writing(norms, written)
        ops.accumulate_recorded(
            norms,
            *lists,
            inv_scale=on(found_inf.device, factor),
            found_inf=found_inf,
            if_finite=True,
        )
        self._become(written())

    def _join(
        self,
        mains: dict[Tensor, Tensor],
        addends: dict[Tensor, Tensor],
        found_inf: Tensor,
        weight: Scalar,
        grads: dict[Tensor, Tensor],
        in_order: bool,
    ) -> None:
        """Count a micro-batch that was added if it was finite."""
        self.note(found_inf)
        if on_host(found_inf) and bool(found_inf):
            self.dropped = self.dropped + nonfinite(grads)
            return
        kept = 1.0 - known(found_inf)
        self.in_order = in_order
        self.replace(mains | {p: mains[p] + addend for p, addend in addends.items()})
        assert self.survivors is not None
        self.survivors = self.survivors + kept
        self.weight = self.weight + weight * kept

    def counted(self) -> Scalar | int:
        """How many micro-batches are in the sum."""
        if self.gathered is not None:
            return self.gathered
        return self.micro_batches if self.survivors is None else self.survivors

    def note(self, found_inf: Tensor) -> None:
        """Remember a found_inf that somebody else formed; any value but zero counts."""
        flag = self.flag(found_inf.device)
        self.flags = {**self.flags, found_inf.device: flag.masked_fill(found_inf != 0, 1.0)}

    def flag(self, device: torch.device) -> Tensor:
        """The found_inf of this window on a device."""
        if device not in self.flags:
            self.flags = {**self.flags, device: zero_flag(device)}
        return self.flags[device]

    def found_inf(self) -> Scalar:
        """1.0 where anything that came in, on any device, was not finite."""
        return any_of(map(known, self.flags.values()))

    def settle(self) -> None:
        """Give every element of sparse and sharded main gradients one place: norms need it."""
        if not self.mains.plain:
            others = {p: s for p, main in self.main.items() if (s := settled(main)) is not main}
            if others:
                self.replace(self.main | others)

    def normaliser(self, reduction: str) -> Scalar:
        """What makes the window's gradient of the main gradients; finite also for a zero weight."""
        unit = 1.0 if self.unit_weight is None else self.unit_weight
        relative: Scalar
        if reduction == "sum":
            relative = unit
        elif isinstance(self.weight, Tensor):
            positive = self.weight > 0
            relative = unit / torch.where(positive, self.weight, 1.0) * positive
        else:
            relative = unit / (self.weight or unit)
        return quotient(relative, self.unit_scale.value)
