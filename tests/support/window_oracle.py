"""What AccumulatingOptimizer is to do, action by action, in float64 and without any of its code.

Written from the documented contract: `.grad` of every parameter holds a `Cell` or nothing, the open
window is a plain weighted sum, and the wrapped optimizer is torch's own, on parameters of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """How the wrapper was constructed."""

    window: int = 1
    max_norm: float | None = None
    norm_type: float = 2.0
    reduction: str = "mean"
    policy: str = "skip_window"
    scaler: str | None = None  # "own": given to the wrapper; "outer": called around it
    in_backward: bool = False
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64

    @property
    def fused(self) -> bool:
        """Whether the wrapped optimizer multiplies gradients, and writes the products back."""
        return self.optimizer.endswith("_fused")


class Cell:
    """A gradient in memory, which several parameters and the user may hold."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.version = 0  # writes that autograd counts

    def write(self, value: Tensor, *, counted: bool = True) -> None:
        self.value = value
        self.version += counted


@dataclass
class Left:
    """What a step, or `zero_grad`, left in `.grad` of a parameter."""

    cell: Cell
    version: int
    brought: bool  # by `opt.backward`: no step takes it again


@dataclass
class Attached:
    """The one micro-batch of the open window, while it lies in `.grad`."""

    cells: list[Cell | None]
    weight: float
    scale: float


@dataclass
class Open:
    """The open window."""

    sums: list[Tensor | None]  # sum(weight_i * grad_i), unscaled
    weight: float = 0.0
    micro_batches: int = 0  # that came in
    kept: int = 0  # that count
    bad: bool = False  # an inf or NaN came in, and counted for something
    loss_scale: float = 1.0
    attached: Attached | None = None


@dataclass
class Report:
    """Of the last closed window."""

    skipped: bool
    micro_batches: int
    weight: float
    loss_scale: float
    total_norm: float
    clip_coef: float


@dataclass
class Scale:
    """A GradScaler: doubles after `interval` good windows, halves after a bad one."""

    value: float = 1.0
    interval: int = 2
    good: int = 0

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.value, self.good = self.value / 2, 0
            return
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * 2, 0


Optimizers = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class Oracle:
    """The wrapper's contract as a program."""

    def __init__(self, settings: Settings, values: Sequence[Tensor], make: Optimizers) -> None:
        self.settings = settings
        self.parameters = [v.detach().clone().requires_grad_() for v in values]
        self.inner = make(self.parameters)
        self.slots: list[Cell | None] = [None] * len(values)  # `.grad`
        self.left: list[Left | None] = [None] * len(values)
        self.scale = Scale()
        self.stepped = False
        # By the wrapper since the last step: an outer scaler is too late. None: it may say so.
        self.accumulated: bool | None = False
        self.last: Report | None = None
        self.drop()

    # `.grad`

    def add(self, coefficients: Sequence[Tensor | None], factor: float = 1.0) -> None:
        """A backward pass: autograd adds in place, or makes a new tensor."""
        for i, coefficient in enumerate(coefficients):
            if coefficient is None:
                continue
            grad, cell = coefficient * factor, self.slots[i]
            if cell is None:
                self.slots[i] = Cell(grad)
            else:
                cell.write(cell.value + grad)

    def user_backward(self, coefficients: Sequence[Tensor | None], factor: float = 1.0) -> None:
        """The user's own: the window leaves `.grad` where it would be added to."""
        attached = self.open.attached
        if attached is not None and any(c is not None for c in coefficients):
            self.detach()
        self.add(coefficients, factor)

    def zero_grad(self, set_to_none: bool) -> None:
        self.detach()
        self.left = [None] * len(self.slots)
        for i, cell in enumerate(self.slots):
            if cell is None:
                continue
            if set_to_none:
                self.slots[i] = None
            else:
                cell.write(torch.zeros_like(cell.value))

        if not set_to_none:
            self.leave(brought=None)

    def leave(self, brought: list[Cell | None] | None) -> None:
        """Remember what lies in `.grad` now, as used; `brought` by `opt.backward`, if any was."""
        for i, cell in enumerate(self.slots):
            mine = brought is not None and brought[i] is cell
            self.left[i] = None if cell is None else Left(cell, cell.version, mine)

    def pending(self) -> list[Cell | None]:
        """What the next step would take out of `.grad`."""
        if self.open.attached is not None:
            return [None] * len(self.slots)
        return [None if self.used_up(i) else cell for i, cell in enumerate(self.slots)]

    def consumed(self, index: int) -> bool:
        """Whether what lies there was left by a step, and not written since."""
        cell, left = self.slots[index], self.left[index]
        return left is not None and left.cell is cell and left.version == cell.version

    def used_up(self, index: int) -> bool:
        left = self.left[index]
        return left is not None and left.brought and self.consumed(index)

    def clear_consumed(self) -> None:
        """Before a backward pass of the wrapper's."""
        self.detach()
        self.slots = [None if self.consumed(i) else cell for i, cell in enumerate(self.slots)]

    # The window

    def drop(self) -> None:
        self.open = Open([None] * len(self.slots))

    def discard(self) -> None:
        if self.open.attached is not None:
            self.slots = [None] * len(self.slots)
        self.drop()
        self.unsure()

    def unsure(self) -> None:
        """After `discard` or an exception an outer scaler may be refused once more."""
        self.accumulated = None if self.accumulated is not False else False

    def attaches(self) -> bool:
        return self.settings.window == 1 and self.open.micro_batches == 0

    def attached_grads(self) -> list[Tensor | None]:
        """What lies in `.grad`, whoever put it there; a step on the user's own has `taken` some."""
        cells = self.slots if self.taken is None else self.taken
        return [None if cell is None else cell.value for cell in cells]

    def detach(self) -> None:
        """The attached micro-batch leaves `.grad`."""
        attached = self.open.attached
        if attached is None:
            return
        grads = self.attached_grads()
        self.slots = [None] * len(self.slots)
        self.drop()
        self.take(grads, attached.weight, attached.scale)

    def take(self, grads: Sequence[Tensor | None], weight: float, scale: float) -> None:
        """One micro-batch goes into the sum."""
        window = self.open = replace(self.open, sums=list(self.open.sums))
        finite = weight == 0.0 or all(g is None or bool(g.isfinite().all()) for g in grads)
        window.micro_batches += 1
        window.loss_scale = scale
        window.bad |= not finite
        if not finite and self.settings.policy == "skip_micro_batch":
            return
        window.kept += 1
        window.weight += weight
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            term = grad * (weight / scale) if weight else torch.zeros_like(grad)
            before = window.sums[i]
            window.sums[i] = term if before is None else before + term

    def refuses(self, grads: Sequence[Tensor | None], weight: float) -> bool:
        """Whether `on_nonfinite="raise"` does."""
        finite = all(g is None or bool(g.isfinite().all()) for g in grads)
        return self.settings.policy == "raise" and weight > 0.0 and not finite

    def take_slots(self, weight: float, scale: float) -> bool:
        """Take what is pending in `.grad` out of it; False if it is refused."""
        return self.take_cells(self.pending(), weight, scale)

    def take_cells(self, cells: list[Cell | None], weight: float, scale: float) -> bool:
        grads = [None if c is None else c.value for c in cells]
        if self.refuses(grads, weight):
            return False
        self.detach()
        self.slots = [None if taken else now for taken, now in zip(cells, self.slots)]
        self.take(grads, weight, scale)
        return True

    def own_scale(self) -> float:
        return self.scale.value if self.settings.scaler == "own" else 1.0

    def backward(self, coefficients: Sequence[Tensor | None], weight: float) -> bool:
        """`opt.backward`; False if it raises, with everything as before."""
        undo = self.begin()
        scale = self.own_scale()
        self.add(coefficients, scale)
        if not self.attaches():
            if not self.take_slots(weight, scale):
                undo()
                return False
        else:
            grads = [None if c is None else c.value for c in self.slots]
            if self.refuses(grads, weight):
                undo()
                return False
            if weight == 0.0:
                self.slots = [
                    None if c is None else Cell(torch.zeros_like(c.value)) for c in self.slots
                ]
            self.open.micro_batches = self.open.kept = 1
            self.open.attached = Attached(list(self.slots), weight, scale)
        self.accumulated = True
        return True

    def failing_backward(self, *, inside: bool) -> None:
        """`opt.backward`, perhaps in `micro_batch`, with an exception in the backward pass."""
        undo = self.begin()
        if self.settings.in_backward and not self.attaches() and not inside:
            undo = self.drop
        undo()

    def begin(self) -> Callable[[], None]:
        """Make way for the gradients of `opt.backward`; what is returned undoes it, and them."""
        window, slots = self.open, list(self.slots)
        attached = window.attached is not None
        self.clear_consumed()
        if not attached:
            slots = list(self.slots)
        contents = [(cell, cell.value) for cell in self.slots if cell is not None]

        def undo() -> None:
            self.open, self.slots = window, slots
            for cell, value in contents:
                cell.write(value)

        return undo

    def accumulate(self, weight: float) -> bool:
        """`opt.accumulate`; False if it raises."""
        if not any(self.pending()) or not self.take_slots(weight, self.own_scale()):
            return False
        self.accumulated = True
        return True

    def micro_batch(self, parts: Sequence[tuple[bool, list[Tensor | None]]], weight: float) -> bool:
        """Backward passes, each through the wrapper or not, as one micro-batch."""
        undo = self.begin()
        scale = self.own_scale()
        for _, coefficients in parts:
            self.add(coefficients, scale)
        weighted = weight if any(through for through, _ in parts) else 1.0
        if not self.take_slots(weighted, scale):
            undo()
            return False
        self.accumulated = True
        return True

    # Closing

    def step(
        self,
        scale: float | None = None,  # of a scaler around the step
        found_inf: bool = False,  # by that scaler
        fails: str | None = None,  # "pre" or "post": a hook of the wrapped step
    ) -> bool:
        """`opt.step`; False if it raises."""
        self.stepped = False
        done = self.try_step(scale, found_inf, fails)
        self.unsure()
        if done:
            self.accumulated = False
        return done

    def try_step(self, scale: float | None, found_inf: bool, fails: str | None) -> bool:
        if not self.take_pending(scale, found_inf):
            return False
        if self.open.micro_batches >= self.settings.window:
            return self.close(fails)
        no_gradient = all(cell is None for cell in self.slots)
        if self.attaches() and no_gradient:
            return fails is None
        return True

    def take_pending(
        self, scale: float | None = None, found_inf: bool = False, new: bool = False
    ) -> bool:
        scale = self.own_scale() if scale is None else scale
        cells = self.pending()
        if new:
            cells = [None if self.consumed(i) else cell for i, cell in enumerate(cells)]
        if not any(cells):
            return True
        if not self.attaches():
            if not self.take_cells(cells, 1.0, scale):
                return False
        else:
            if self.refuses([None if c is None else c.value for c in cells], 1.0):
                return False
            self.open.micro_batches = self.open.kept = 1
            self.open.attached = Attached(cells, 1.0, scale)
            self.taken = cells
        if found_inf and self.settings.policy == "skip_window":
            self.open.bad = True
        return True

    def flush(self) -> bool:
        self.stepped = False
        self.unsure()
        if not self.take_pending(new=True):
            return False
        self.accumulated = False
        return self.close(None) if self.open.micro_batches else True

    taken: list[Cell | None] | None = None  # the user's own gradients that a step attaches

    def close(self, fails: str | None) -> bool:
        """Step on the window; False if the wrapped step raises."""
        window, attached, taken = self.open, self.open.attached, self.taken
        if attached is not None:
            grads = self.attached_grads()
            self.taken = None
            self.open = Open([None] * len(self.slots), bad=window.bad)
            self.take(grads, attached.weight, attached.scale)
            window, self.open = self.open, window
        divisor = (window.weight or 1.0) if self.settings.reduction == "mean" else 1.0
        gradient = [None if s is None else s / divisor for s in window.sums]
        norm = p_norm([g for g in gradient if g is not None], self.settings.norm_type)
        coef = 1.0
        if self.settings.max_norm is not None:
            coef = min(1.0, self.settings.max_norm / (norm + 1e-6))
        dropping = self.settings.policy == "skip_micro_batch"
        skip = window.kept == 0 if dropping else window.bad
        called = not skip
        if called and fails == "pre":
            if taken is not None:  # as it was before the step
                self.drop()
            return False
        if called:
            for p, g in zip(self.parameters, gradient):
                p.grad = None if g is None else (g * coef).to(p.dtype)
            self.inner.step()
        if self.settings.scaler == "own":
            self.scale.update(window.bad or skip)
        kept = window.kept if dropping else window.micro_batches
        self.last = Report(skip, kept, window.weight, window.loss_scale, norm, coef)
        if attached is not None:
            if taken is None:
                self.leave(brought=attached.cells)
            else:  # what no step takes again stays so
                before = self.left
                keeps = [self.used_up(i) for i in range(len(before))]
                self.left = [None] * len(before)
                self.leave(brought=None)
                self.left = [b if k else n for b, k, n in zip(before, keeps, self.left)]
        self.stepped = True
        self.drop()
        return not (called and fails == "post")

    def main_grad(self, index: int) -> Tensor | None:
        attached = self.open.attached
        if attached is None:
            return self.open.sums[index]
        grad = self.attached_grads()[index]
        if grad is None:
            return None
        return grad * (attached.weight / attached.scale) if attached.weight else grad * 0.0

    def copied(self) -> None:
        """A copy's parameters come without `.grad`; the window comes whole."""
        self.detach()
        self.slots, self.left = [None] * len(self.slots), [None] * len(self.slots)


def p_norm(tensors: Sequence[Tensor], p: float) -> float:
    """Of all elements as one vector."""
    elements = [abs(x) for t in tensors for x in t.flatten().tolist()]
    if any(math.isnan(x) for x in elements):
        return math.nan
    if math.isinf(p):
        return max(elements, default=0.0)
    return math.inf if math.inf in elements else sum(x**p for x in elements) ** (1 / p)
