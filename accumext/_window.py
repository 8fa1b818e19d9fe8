"""The open window: the main gradients, the unit they are kept in, and what they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext._gradients import (
    are_plain,
    main_dtype,
    nonfinite,
    own,
    per_device,
    plain,
    scale_,
    settled,
    zero_flag,
)
from accumext._main_grads import MainGrads
from accumext._numbers import Scalar, any_of, known, on, on_host, quotient


class LossScale(NamedTuple):
    """What a loss was multiplied with; equal keys mean equal values, None says nothing."""

    value: Scalar = 1.0
    key: tuple[int, int] | None = None  # for a value that only the device knows


UNSCALED = LossScale()


class Window:
    """`main[p] = unit_scale.value / unit_weight * sum(weight_i * grad_i)` over what was taken in.

    The unit is that of the first micro-batch, so its gradients join as they are; each later
    micro-batch is brought to the unit with its own scale and weight.
    """

    def __init__(self) -> None:
        self.mains = MainGrads([], [])
        self.in_order = True  # the parameters came in the order in which the optimizer has them
        self.lying: list[Tensor | None] | None = None  # `.grad` while that is the main gradients
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

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, whose parameters come without `.grad`: the main gradients on their own."""
        self.refresh()
        value_alone = LossScale(self.unit_scale.value)  # a key means something in one process only
        return {**self.__dict__, "lying": None, "unit_scale": value_alone}

    @property
    def main(self) -> dict[Tensor, Tensor]:
        """The main gradients by parameter, to read."""
        return self.mains.by_parameter

    def replace(self, mains: dict[Tensor, Tensor]) -> None:
        """Set the main gradients, of which nothing is known then."""
        self.mains, self.norm = MainGrads.of(mains), None

    def factor(self, weight: Scalar, scale: LossScale) -> Scalar:
        """What brings a micro-batch to the unit; the host number 1.0 where nothing has to."""
        if self.unit_weight is None:
            return 1.0
        relative = weight / self.unit_weight
        if scale.key is not None and scale.key == self.unit_scale.key:
            return relative
        return relative * quotient(self.unit_scale.value, scale.value)

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

    def take(self, grads: dict[Tensor, Tensor], factor: Scalar) -> None:
        """Add gradients of a micro-batch. A parameter's first one becomes its main gradient."""
        if not isinstance(factor, Tensor) and factor == 0.0:
            factor = _cleared(grads.values())
        fresh: dict[Tensor, Tensor] = {}
        sparse: dict[Tensor, Tensor] = {}
        mains: list[Tensor] = []
        addends: list[Tensor] = []
        before = self.main
        for parameter, grad in grads.items():
            main = before.get(parameter)
            if main is None:
                fresh[parameter] = grad
            elif grad.is_sparse or main.is_sparse:
                grad = grad.to(main.dtype) * factor
                sparse[parameter] = grad + main if main.is_sparse else main + grad
            else:
                mains.append(main)
                addends.append(grad)
        norm = self._accumulate(mains, addends, factor)
        if fresh or sparse:
            self.in_order = self.in_order and not (fresh and self.main)
            self.replace(self.main | sparse | own(fresh, factor))
        else:
            self.norm = norm if len(mains) == len(self.mains.tensors) else None

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
        lying: list[Tensor | None],  # `.grad` of each parameter
        weight: Scalar,
        scale: LossScale,
    ) -> None:
        """Take in the first micro-batch and leave it in `.grad`."""
        factor = self.count(weight, scale)
        grads = [grad for grad in lying if grad is not None]
        if len(grads) < len(lying):
            parameters = [p for p, g in zip(parameters, lying, strict=True) if g is not None]
        self.mains, self.lying = MainGrads(parameters, grads), lying
        if not isinstance(factor, Tensor) and factor == 0.0:
            factor = _cleared(grads)
        scale_(grads, factor, self.mains.plain)

    @property
    def attached(self) -> bool:
        """Whether the main gradients are the tensors in `.grad`."""
        return self.lying is not None

    def is_where_it_was(self, lying: Sequence[Tensor | None]) -> bool:
        """Whether `.grad` of every parameter is what it was when the main gradients were left."""
        before = self.lying
        return before is not None and len(before) == len(lying) and all(map(is_, before, lying))

    def refresh(self) -> None:
        """While the main gradients lie in `.grad`, they are whatever lies there."""
        if self.attached:
            self.replace({p: p.grad for p in self.mains.parameters if p.grad is not None})

    def detach(self) -> None:
        """Take the main gradients out of `.grad`."""
        if self.attached:
            self.refresh()
            self.mains.withdraw()
            self.replace(own(self.main))
            self.lying = None

    def take_back(self, parameters: Sequence[Tensor], lying: Sequence[Tensor | None]) -> None:
        """The main gradients are what lies in `.grad`, where autograd added a micro-batch to it."""
        self.norm = None
        if len(lying) == len(self.mains.tensors) and all(map(is_, lying, self.mains.tensors)):
            return
        pairs = zip(parameters, lying, strict=True)
        others = {p: g for p, g in pairs if g is not None and g is not self.main.get(p)}
        self.in_order = self.in_order and others.keys() <= self.main.keys()
        self.replace(self.main | own(others))

    def arrange(self, parameters: Iterable[Tensor]) -> None:
        """Bring the main gradients into the order of the parameters: their norm depends on it."""
        if not self.in_order:
            self.mains = MainGrads.of({p: self.main[p] for p in parameters if p in self.main})
            self.in_order = True

    def take_if_finite(self, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> None:
        """Take in one micro-batch if all of it is finite; else leave the sums bit for bit.

        The unit is 1, so that no dropped micro-batch can show in the sum of the others.
        """
        found_inf = zero_flag(next(iter(grads.values())).device if grads else None)
        if self.survivors is None:
            self.survivors = float(self.micro_batches)
        if self.unit_weight is None:
            self.unit_weight = 1.0
        mains = dict(self.main)
        self.in_order = self.in_order and (not mains or grads.keys() <= mains.keys())
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
        ops.unscale_check_clip_accumulate_(
            [plain(addends.get(p, mains[p])) for p in incoming],
            [plain(grad) for grad in incoming.values()],
            inv_scale=self.factor(weight, scale),
            max_norm=math.inf,
            found_inf=found_inf,
            if_finite=True,
        )
        for p, addend in addends.items():
            mains[p] = mains[p] + addend
        self.note(found_inf)
        self.micro_batches += 1
        self.loss_scale = scale.value
        if on_host(found_inf) and bool(found_inf):
            self.dropped += nonfinite(grads)
            return
        kept = 1.0 - known(found_inf)
        self.replace(mains)
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
        flag.masked_fill_(found_inf != 0, 1.0)

    def flag(self, device: torch.device) -> Tensor:
        """The found_inf of this window on a device."""
        return self.flags.setdefault(device, zero_flag(device))

    def found_inf(self) -> Scalar:
        """1.0 where anything that came in, on any device, was not finite."""
        return any_of(map(known, self.flags.values()))

    def settle(self) -> None:
        """Give every element of sparse and sharded main gradients one place: norms need it."""
        if not self.mains.plain:
            others = {p: s for p, main in self.main.items() if (s := settled(main)) is not main}
            if others and self.attached:
                MainGrads.of(others).lend()
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

    def normalise(self, reduction: str) -> tuple[Tensor, Tensor]:
        """Make the main gradients the window's gradient, in one pass; its norm and found_inf."""
        mains = self.mains.tensors
        found_inf = zero_flag(mains[0].device)
        factor = on(mains[0].device, self.normaliser(reduction))
        norm = ops.accumulate_(mains, mains, inv_scale=factor, found_inf=found_inf, overwrite=True)
        if reduction == "sum":
            self.unit_weight = 1.0
        elif isinstance(self.weight, Tensor):
            self.unit_weight = torch.where(self.weight > 0, self.weight, 1.0)
        else:
            self.unit_weight = self.weight or 1.0
        self.unit_scale = UNSCALED
        return norm, found_inf

    def _accumulate(
        self, mains: list[Tensor], addends: list[Tensor], factor: Scalar
    ) -> Tensor | None:
        """`main += addend * factor`; returns the norm where one process and device holds it all."""
        if not mains:
            return None
        plain_already = self.mains.plain and are_plain([mains[0], *addends])
        norms = [
            ops.accumulate_(*lists, inv_scale=on(device, factor), found_inf=self.flag(device))
            for device, lists in per_device(mains, addends, plain_already=plain_already)
        ]
        return norms[0] if len(norms) == 1 and not self.mains.sharded else None


def _cleared(grads: Iterable[Tensor]) -> float:
    """Set to zero what may hold NaN, the mean of nothing; returns the factor that is left, 1."""
    for grad in grads:
        grad.detach().zero_()
    return 1.0
