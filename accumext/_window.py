"""The open window: the main gradients, the unit they are kept in, and what they are made of."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from accumext import ops
from accumext._gradients import (
    Scalar,
    by_device,
    main_dtype,
    nonfinite,
    on,
    on_host,
    own,
    plain,
    scale_,
    zero_flag,
)


class LossScale(NamedTuple):
    """What a loss was multiplied with; equal keys mean equal values, None says nothing."""

    value: Scalar = 1.0
    key: tuple[int, int] | None = None


UNSCALED = LossScale()


class Window:
    """`main[p] = unit_scale.value / unit_weight * sum(weight_i * grad_i)` over what was taken in.

    The unit is that of the first micro-batch, so its gradients join as they are; each later
    micro-batch is brought to the unit with its own scale and weight.
    """

    def __init__(self) -> None:
        self.main: dict[Tensor, Tensor] = {}  # by parameter; only those that received a gradient
        self.attached = False  # the main gradients are the tensors in `.grad`
        self.micro_batches = 0
        self.weight: Scalar = 0.0
        self.unit_weight: Scalar | None = None  # None while every weight was the number zero
        self.unit_scale = UNSCALED
        self.loss_scale: Scalar = 1.0  # of the latest micro-batch
        self.flags: dict[torch.device, Tensor] = {}  # found_inf of what came in, one per device
        self.norm: Tensor | None = None  # the 2-norm of `main` where the last pass found it
        self.survivors: Tensor | None = None  # micro-batches kept, once bad ones are dropped
        self.gathered: Tensor | None = None  # micro-batches of all processes, once reduced
        self.dropped: list[Tensor] = []  # parameters that had them dropped, where the host knows

    def factor(self, weight: Scalar, scale: LossScale) -> Scalar:
        """What brings a micro-batch to the unit; the host number 1.0 where nothing has to."""
        if self.unit_weight is None:
            return 1.0
        relative = weight / self.unit_weight
        if scale.key is not None and scale.key == self.unit_scale.key:
            return relative
        return relative * (self.unit_scale.value / scale.value)

    def add(self, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> None:
        """Take in one micro-batch. A parameter's first gradient becomes its main gradient."""
        factor = self._count(grads, weight, scale)
        fresh = own({p: g for p, g in grads.items() if p not in self.main})
        scale_(fresh.values(), factor)
        pairs: list[tuple[Tensor, ...]] = []
        for parameter, grad in grads.items():
            if parameter in fresh:
                continue
            main = self.main[parameter]
            if grad.is_sparse or main.is_sparse:
                grad = grad.to(main.dtype) * factor
                self.main[parameter] = grad + main if main.is_sparse else main + grad

            else:
                pairs.append((main, grad))
        self.main.update(fresh)
        norm = self._accumulate(pairs, factor)
        self.norm = norm if len(pairs) == len(self.main) else None

    def attach(self, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> None:
        """Take in the first micro-batch and leave it in `.grad`."""
        scale_(grads.values(), self._count(grads, weight, scale))
        self.main = dict(grads)
        self.attached = True

    def refresh(self) -> None:
        """While the main gradients lie in `.grad`, they are whatever lies there."""
        if self.attached:
            self.main = {p: p.grad for p in self.main if p.grad is not None}

    def detach(self) -> None:
        """Take the main gradients out of `.grad`."""
        if self.attached:
            self.refresh()
            for parameter in self.main:
                parameter.grad = None
            self.main = own(self.main)
            self.attached = False
            self.norm = None

    def lend(self) -> None:
        """Put the main gradients into `.grad`, for autograd to add to in place."""
        for parameter, main in self.main.items():
            parameter.grad = main

    def take_back(self, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> None:
        """Take the main gradients out of `.grad`, a micro-batch in this window's unit richer."""
        self._count({}, weight, scale)
        self.main, self.norm = own(grads), None

    def add_if_finite(self, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> None:
        """Take in one micro-batch if all of it is finite; else leave the sums bit for bit.

        The unit is 1, so that no dropped micro-batch can show in the sum of the others.
        """
        found_inf = zero_flag(next(iter(grads.values())).device if grads else None)
        if self.survivors is None:
            self.survivors = found_inf.double() + self.micro_batches
        if self.unit_weight is None:
            self.unit_weight = 1.0
        mains = dict(self.main)
        for p, g in grads.items():
            if p not in mains:
                mains[p] = torch.zeros_like(g, dtype=main_dtype(p))
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
        kept = 1.0 - found_inf.double()
        self.main, self.norm = mains, None
        self.survivors = self.survivors + kept
        self.weight = self.weight + weight * kept

    def counted(self) -> int | Tensor:
        """How many micro-batches are in the sum."""
        if self.gathered is not None:
            return self.gathered
        return self.micro_batches if self.survivors is None else self.survivors

    def is_empty(self) -> bool:
        """Whether nothing came in on any process. May read the device."""
        return not self.micro_batches and (self.gathered is None or not bool(self.gathered))

    def note(self, found_inf: Tensor) -> None:
        """Remember a found_inf that somebody else formed; any value but zero counts."""
        flag = self.flag(found_inf.device)
        flag.copy_(torch.maximum(flag, (found_inf != 0).to(flag.dtype)))

    def flag(self, device: torch.device) -> Tensor:
        """The found_inf of this window on a device."""
        return self.flags.setdefault(device, zero_flag(device))

    def found_inf(self, device: torch.device | None) -> Tensor:
        """1.0 where anything that came in, on any device, was not finite."""
        flags = list(self.flags.values()) or [zero_flag(device)]
        device = flags[0].device if device is None else device
        return torch.stack([flag.to(device, non_blocking=True) for flag in flags]).amax()

    def coalesce(self) -> None:
        """Give every element of a sparse main gradient one place, so that norms are right."""
        for parameter, main in self.main.items():
            if main.is_sparse:
                self.main[parameter] = main.coalesce()

    def normaliser(self, reduction: str) -> Scalar:
        """What makes the window's gradient of the main gradients; finite also for a zero weight."""
        unit = 1.0 if self.unit_weight is None else self.unit_weight
        if reduction == "sum":
            return unit / self.unit_scale.value
        if isinstance(self.weight, Tensor):
            positive = self.weight > 0
            relative: Scalar = unit / torch.where(positive, self.weight, 1.0) * positive
        else:
            relative = unit / (self.weight or unit)
        return relative / self.unit_scale.value

    def _count(self, grads: dict[Tensor, Tensor], weight: Scalar, scale: LossScale) -> Scalar:
        """Count a micro-batch in, let the first one set the unit, and return its factor."""
        factor = self.factor(weight, scale)
        if isinstance(weight, Tensor):
            if self.unit_weight is None:  # which divides, and must not be a zero of the device
                self.unit_weight, self.unit_scale = torch.where(weight > 0, weight, 1.0), scale
                factor = (weight > 0).double()
        elif weight == 0.0:  # not multiplied: such a micro-batch may hold NaN, the mean of nothing
            factor = 1.0
            for grad in grads.values():
                grad.detach().zero_()
        elif self.unit_weight is None:
            self.unit_weight, self.unit_scale = weight, scale
        self.micro_batches += 1
        self.weight = self.weight + weight
        self.loss_scale = scale.value
        return factor

    def _accumulate(self, pairs: list[tuple[Tensor, ...]], factor: Scalar) -> Tensor | None:
        """`main += grad * factor`; returns the norm where one device holds every pair."""
        norms = [
            ops.accumulate_(
                [plain(main) for main, _ in mine],
                [plain(grad) for _, grad in mine],
                inv_scale=on(device, factor),
                found_inf=self.flag(device),
            )
            for device, mine in by_device(pairs).items()
        ]
        return norms[0] if len(norms) == 1 else None
