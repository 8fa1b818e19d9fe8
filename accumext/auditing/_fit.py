"""The factor with which each pass of a window is in the gradient that its step used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile

import torch
from torch import Tensor

from accumext.auditing._events import Clipped, Pass, Sketch, View, Window, is_call, only

_NOTHING = 1e-4  # relative size below which a factor counts as zero
_EXPLAINED = 1e-3  # part of the gradient that may be rounding
_EXPLAINED_HALF = 0.1  # the same if gradients, or their sums, are of half precision
_PLAIN = 1e-5  # relative distance of a factor from a plain one that may be rounding
_WELL_POSED = 1e-5  # smallest singular value of the sketches, relative to the greatest


@dataclass(frozen=True)
class Part:
    """A pass in a window's gradient."""

    of: Pass
    rank: int
    factor: float  # of the pass's gradient in the step's gradient, without clips

    @property
    def after(self) -> float:
        """The factor that the loss got after the pass, apart from the inverse of the loss scale."""
        return self.factor * self.of.scale


@dataclass(frozen=True)
class Fit:
    """What a step's gradient is made of."""

    window: Window
    parts: tuple[Part, ...]
    equal: bool  # all passes that are in it have one factor
    earlier: float  # factor of what the last step left in `.grad`, over this window's
    by_hand: bool  # cleared passes are in it: the loop has kept their gradients

    @property
    def there(self) -> list[Part]:
        """The passes that are in the gradient; smaller factors are rounding errors."""
        top = max(abs(part.factor) for part in self.parts)
        return [part for part in self.parts if abs(part.factor) >= _NOTHING * top]


@lru_cache(maxsize=8)
def fits(view: View) -> tuple[Fit, ...]:
    """Return the fits of the windows whose gradient is a sum of their passes."""
    return tuple(filter(None, (_fit(view, window) for window in view.windows)))


def _fit(view: View, window: Window) -> Fit | None:
    step, wrapped = window.step, view.optimizer.wrapped
    since_clip = dropwhile(lambda e: not (isinstance(e, Clipped) and e.factor < 1), window.events)
    if step.used is None or step.closure_calls > 1 or (wrapped and only(since_clip, Pass)):
        return None  # the wrapper keeps its sum outside `.grad`: what was clipped is unknown
    used = step.used / step.factor if step.factor else step.used
    own = torch.zeros(len(used), 1, dtype=torch.bool, device=used.device)
    own[list(view.optimizer.parameters)] = True
    of_ranks = [one.windows[window.index : window.index + 1] for one in view.ranks or (view,)]
    passes = [
        (one, rank, clips, cleared)
        for rank, same_window in enumerate(of_ranks)
        for its in same_window
        for one, clips, cleared in _afterwards(its, len(used))[0]
    ]
    columns = [torch.where(own, clips * one.gradient, 0.0) for one, _, clips, _ in passes]
    if not passes or not all(map(finite, (used, *columns))):
        return None
    tolerance = _EXPLAINED_HALF if view.record.half else _EXPLAINED
    numbers = int(torch.stack([used, *columns]).any(0).sum())  # equations for the factors
    every = list(range(len(passes)))
    kept = [i for i, (*_, cleared) in enumerate(passes) if not cleared]
    sets = [kept, every] if 0 < len(kept) < len(every) else [every]
    with_left = []
    left = None if window.previous is None else window.previous.left
    if left is not None and finite(left):
        columns.append(torch.where(own, _afterwards(window, len(used))[1] * left, 0.0))
        with_left = [[every, [len(passes)]]]
    # Try one factor for all; then another one for what the last step left; then one for each pass.
    for groups in (*([some] for some in sets), *with_left, *([[i] for i in some] for some in sets)):
        sums = [torch.stack([columns[i] for i in group]).sum(0) for group in groups]
        few = numbers == len(groups) == 1  # any factor explains one number: only a plain one counts
        found = _solve(sums, used, tolerance) if few or 2 * len(groups) <= numbers else None
        if found is None or (few and not _is_plain(float(found), len(groups[0]))):
            continue
        factors = {i: f for group, f in zip(groups, found.tolist()) for i in group}
        before = factors.pop(len(passes), None)
        if before is not None and abs(before) <= tolerance * abs(factors[0]):
            continue
        top = max(map(abs, factors.values()))
        return Fit(
            window,
            tuple(Part(one, rank, factors.get(i, 0.0)) for i, (one, rank, *_) in enumerate(passes)),
            equal=before is not None or len(groups) == 1,
            earlier=0.0 if before is None else before / factors[0],
            by_hand=not wrapped  # which sums outside `.grad`
            and any(abs(f) > tolerance * top for i, f in factors.items() if i not in kept),
        )
    return None


def _is_plain(factor: float, passes: int) -> bool:
    """Tell whether a factor is that of a sum, or of a mean over the passes."""
    return any(math.isclose(factor, plain, rel_tol=_PLAIN) for plain in (1.0, 1 / passes))


def _afterwards(window: Window, parameters: int) -> tuple[list[tuple[Pass, Tensor, bool]], Tensor]:
    """Return the passes, each with the product of the clips after it and whether a `zero_grad`
    cleared it; and the product of all clips, for what was in `.grad` before the window."""
    factors = torch.ones(parameters, 1, dtype=torch.float64, device="cpu")
    passes, cleared = [], False
    for event in reversed(window.events):
        cleared |= is_call(event, "zero_grad")
        if isinstance(event, Pass):
            passes.append((event, factors.clone(), cleared))
        elif isinstance(event, Clipped) and event.factor > 0:
            factors[list(event.parameters)] *= event.factor
    return passes[::-1], factors


def _solve(columns: list[Sketch], used: Sketch, tolerance: float) -> Tensor | None:
    """Return factors with which columns add up to a gradient; None without a unique solution."""
    matrix = torch.stack([column.flatten() for column in columns], dim=1)
    norms = matrix.norm(dim=0)
    target = used.flatten()
    small = bool((norms <= tolerance * norms.max()).any())  # rounding would decide their factors
    if small or not bool(target.norm() > 0):
        return None
    matrix = matrix / norms
    singular = torch.linalg.svdvals(matrix)
    if len(singular) < len(columns) or singular[-1] < _WELL_POSED * singular[0]:
        return None
    factors: Tensor = torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]
    explained = bool((matrix @ factors - target).norm() <= tolerance * target.norm())
    return factors / norms if explained else None


def finite(values: Sketch) -> bool:
    return bool(values.isfinite().all())
