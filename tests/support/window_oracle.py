"""The rules of AccumulatingOptimizer, action by action, in float64 and without any of its code.

Written from the documented contract: `.grad` of every parameter holds a `Cell` or nothing, the open
window is a weighted sum, or with window=1 what lies in `.grad`, and the wrapped optimizer is
torch's own, on parameters of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """The settings with which the wrapper was constructed."""

    window: int = 1
    max_norm: float | None = None
    norm_type: float = 2.0
    reduction: str = "mean"
    policy: str = "skip_window"
    scaler: str | None = None  # "own": given to the wrapper; "outer": called around it
    in_backward: bool = False
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64


class Cell:
    """A gradient in memory, which several parameters and the user may hold."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.version = 0  # writes that autograd counts

    def write(self, value: Tensor, *, counted: bool = True) -> None:
        self.value = value
        self.version += counted


Cells = list[Cell | None]
Coefficients = Sequence[Tensor | None]  # a gradient by parameter; None where it does not reach


@dataclass
class Left:
    """The gradient that a step, or `zero_grad`, left in `.grad` of a parameter."""

    cell: Cell
    version: int
    used_up: bool  # made by `opt.backward`: no step takes it again


@dataclass
class InGrad:
    """The one micro-batch of an open window that is what lies in `.grad`."""

    weight: float
    scale: float
    made: Cells  # by `opt.backward`; empty where the user's own passes have


@dataclass
class Open:
    """The open window."""

    sums: list[Tensor | None]  # sum(weight_i * grad_i), unscaled
    weight: float = 0.0
    micro_batches: int = 0  # that came in
    kept: int = 0  # that count
    bad: bool = False  # an inf or NaN came in, and counted for something
    scales: list[float] = field(default_factory=list)  # that were in force
    in_grad: InGrad | None = None
    taken: Cells = field(default_factory=list)  # in which it may hold its sums


@dataclass
class Report:
    """Of the last closed window."""

    skipped: bool
    micro_batches: int
    weight: float
    scales: list[float]
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
        self.slots: Cells = [None] * len(values)  # `.grad`
        self.left: list[Left | None] = [None] * len(values)
        self.scale = Scale()
        self.stepped = False
        # By the wrapper since the last step: an outer scaler is too late. None: it may say so.
        self.accumulated: bool | None = False
        self.last: Report | None = None
        self.knows_grads = True  # False: a step may have written `.grad`, and nobody says what
        self.drop()

    # `.grad`

    def add(self, coefficients: Coefficients, factor: float = 1.0) -> None:
        """Run a backward pass: autograd adds in place, or makes a new tensor."""
        for i, coefficient in enumerate(coefficients):
            if coefficient is None:
                continue
            grad, cell = coefficient * factor, self.slots[i]
            if cell is None:
                self.slots[i] = Cell(grad)
            else:
                cell.write(cell.value + grad)

    def clear(self) -> None:
        self.slots = [None] * len(self.slots)

    def zero_grad(self, set_to_none: bool) -> None:
        self.take_out()
        if set_to_none:
            self.clear()
        for cell in self.slots:
            if cell is not None:
                cell.write(torch.zeros_like(cell.value))
        self.leave([])

    def leave(self, made: Cells) -> None:
        """Remember what lies in `.grad` now, as used."""
        made = made or [None] * len(self.slots)
        self.left = [
            None if cell is None else Left(cell, cell.version, mine is cell)
            for cell, mine in zip(self.slots, made)
        ]

    def consumed(self, index: int) -> bool:
        """Tell whether the gradient there was left by a step, and not written since."""
        cell, left = self.slots[index], self.left[index]
        return left is not None and left.cell is cell and left.version == cell.version

    def used_up(self, index: int) -> bool:
        left = self.left[index]
        return left is not None and left.used_up and self.consumed(index)

    def pending(self, new: bool = False) -> Cells:
        """Return all that is in `.grad` and in no window; with `new` only what no step has used."""
        if self.open.in_grad is not None:
            return [None] * len(self.slots)
        gone = self.consumed if new else self.used_up
        return [None if gone(i) else cell for i, cell in enumerate(self.slots)]

    def make_way(self) -> None:
        """Leave in `.grad` what is part of a backward pass of the wrapper's that begins."""
        self.slots = self.pending(new=True) if self.open.in_grad is None else self.slots
        self.take_out()

    # The window

    def drop(self) -> None:
        self.open = Open([None] * len(self.slots))

    def discard(self) -> None:
        if self.open.in_grad is not None:
            self.clear()
        self.drop()
        self.unsure()

    def unsure(self) -> None:
        """Allow that an outer scaler is refused once more, after `discard` or an exception."""
        self.accumulated = None if self.accumulated is not False else False

    def stays_in_grad(self) -> bool:
        """Tell whether the next micro-batch stays in `.grad`."""
        return self.settings.window == 1 and self.open.micro_batches == 0

    def take_out(self) -> None:
        """Move the window out of `.grad`."""
        in_grad = self.open.in_grad
        if in_grad is None:
            return
        cells = self.slots
        self.clear()
        self.drop()
        self.take(cells, in_grad.weight, in_grad.scale)

    def take(self, cells: Cells, weight: float, scale: float) -> None:
        """Add one micro-batch to the sum."""
        window = self.open
        finite = weight == 0.0 or all_finite(cells)
        window.micro_batches += 1
        window.scales.append(scale)
        window.bad |= not finite and self.looks
        if not finite and self.settings.policy == "skip_micro_batch":
            return
        window.kept += 1
        window.weight += weight
        window.taken += cells
        for i, cell in enumerate(cells):
            if cell is None:
                continue
            grad, before = cell.value, window.sums[i]
            term = grad * (weight / scale) if weight else torch.zeros_like(grad)
            window.sums[i] = term if before is None else before + term

    def take_in(
        self, cells: Cells, weight: float, scale: float, mine: bool = False, stays: bool = False
    ) -> bool:
        """Take gradients out of `.grad`, or make what lies there the window if it `stays`; False if
        they are refused. `mine` are those that `opt.backward` has made."""
        if self.settings.policy == "raise" and weight > 0.0 and not all_finite(cells):
            return False
        if not stays:
            self.clear()
            self.take(cells, weight, scale)
            return True
        if weight == 0.0:
            cells = [None if c is None else Cell(torch.zeros_like(c.value)) for c in cells]
        self.slots = cells
        self.open.micro_batches = self.open.kept = 1
        self.open.in_grad = InGrad(weight, scale, list(cells) if mine else [])
        return True

    @property
    def looks(self) -> bool:
        return self.settings.policy != "step" or self.settings.scaler == "own"

    def own_scale(self) -> float:
        return self.scale.value if self.settings.scaler == "own" else 1.0

    def backward(self, coefficients: Coefficients, weight: float) -> bool:
        """Call `opt.backward`; False if it raises."""
        self.make_way()
        scale = self.own_scale()
        self.add(coefficients, scale)
        return self.brought(self.take_in(self.slots, weight, scale, True, self.stays_in_grad()))

    def micro_batch(self, parts: Sequence[tuple[bool, Coefficients]], weight: float) -> bool:
        """Run backward passes, each through the wrapper or not, as one micro-batch."""
        self.make_way()
        scale = self.own_scale()
        for _, coefficients in parts:
            self.add(coefficients, scale)
        weight = weight if any(through for through, _ in parts) else 1.0
        return self.brought(self.take_in(self.slots, weight, scale))

    def brought(self, done: bool) -> bool:
        if done:
            self.accumulated = True
        else:
            self.clear()
            self.unsure()
        return done

    def fail(self, dropped: bool) -> None:
        """Fail in the backward pass of `opt.backward` or `micro_batch`."""
        self.make_way()
        self.clear()
        self.unsure()
        if dropped:
            self.drop()

    def accumulate(self, weight: float) -> bool:
        """Call `opt.accumulate`; False if it raises."""
        cells = self.pending()
        if not any(cells) or not self.take_in(cells, weight, self.own_scale()):
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
        """Call `opt.step`; False if it raises."""
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
        without = self.stays_in_grad() and not any(self.slots)  # the wrapped step is called
        return fails is None or not without

    def take_pending(
        self, scale: float | None = None, found_inf: bool = False, new: bool = False
    ) -> bool:
        scale = self.own_scale() if scale is None else scale
        cells = self.pending(new)
        if not any(cells):
            return True
        done = self.take_in(cells, 1.0, scale, stays=self.stays_in_grad())
        if done and found_inf and self.settings.policy in ("skip_window", "step"):
            self.open.bad = True
        return done

    def flush(self) -> bool:
        self.stepped = False
        self.unsure()
        if not self.take_pending(new=True):
            return False
        self.accumulated = False
        return self.close(None) if self.open.micro_batches else True

    def close(self, fails: str | None) -> bool:
        """Step on the window; False if the wrapped step raises."""
        settings, before, in_grad = self.settings, self.open, self.open.in_grad
        if in_grad is not None:
            self.open = Open([None] * len(self.slots), bad=before.bad)
            self.take(self.slots, in_grad.weight, in_grad.scale)
        window, self.open = self.open, before
        divisor = (window.weight or 1.0) if settings.reduction == "mean" else 1.0
        gradient = [None if s is None else s / divisor for s in window.sums]
        norm = p_norm([g for g in gradient if g is not None], settings.norm_type)
        coef = 1.0
        if settings.max_norm is not None:
            coef = settings.max_norm / (norm + 1e-6)
            coef = 1.0 if coef > 1.0 else coef  # NaN stays
        dropping = settings.policy == "skip_micro_batch"
        skip = window.kept == 0 if dropping else window.bad
        if settings.policy == "raise" if skip else fails == "pre":
            if in_grad is not None and not in_grad.made:  # the user's own, as before the step
                self.drop()
            return False
        clipped = [None if g is None else g * coef for g in gradient]
        if not skip:
            for p, g in zip(self.parameters, clipped):
                p.grad = None if g is None else g.to(p.dtype)
            self.inner.step()
        if settings.scaler == "own":
            self.scale.update(window.bad or skip)
        kept = window.kept if dropping else window.micro_batches
        if settings.max_norm is None and not self.looks:
            norm = math.nan  # nobody has measured it
        self.last = Report(skip, kept, window.weight, window.scales, norm, coef)
        if in_grad is not None:
            self.knows_grads = not skip and settings.max_norm != 0.0
            cells = [cell for cell in self.slots if cell is not None]
            if self.knows_grads and len(set(map(id, cells))) == len(cells):
                for cell, g in zip(self.slots, clipped):
                    if cell is not None:
                        cell.write(g)
            self.leave(in_grad.made)
        self.stepped = True
        self.drop()
        return skip or fails != "post"

    def main_grad(self, index: int) -> Tensor | None:
        in_grad, cell = self.open.in_grad, self.slots[index]
        if in_grad is None:
            return self.open.sums[index]
        return None if cell is None else cell.value * (in_grad.weight / in_grad.scale)

    def all_is_finite(self) -> bool:
        sums = [s for s in self.open.sums if s is not None]
        return all_finite(self.slots) and all(bool(s.isfinite().all()) for s in sums)

    def copied(self) -> None:
        """Become a copy: parameters come without `.grad`, the window whole, in its own memory."""
        self.take_out()
        self.open.taken = []
        self.clear()
        self.left = [None] * len(self.slots)


def all_finite(cells: Cells) -> bool:
    return all(cell is None or bool(cell.value.isfinite().all()) for cell in cells)


def p_norm(tensors: Sequence[Tensor], p: float) -> float:
    """Return the norm of all elements as one vector."""
    elements = [abs(x) for t in tensors for x in t.flatten().tolist()]
    if any(math.isnan(x) for x in elements):
        return math.nan
    if math.isinf(p):
        return max(elements, default=0.0)
    return math.inf if math.inf in elements else sum(x**p for x in elements) ** (1 / p)
