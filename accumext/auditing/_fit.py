"""With which factor each pass of a window is in the gradient that its step used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile

import torch
from torch import Tensor

from accumext.auditing._events import Clipped, Pass, Sketch, View, Window, is_call

NOTHING = 1e-4  # relative size of a factor that is none
_EXPLAINED = 1e-3  # of the gradient may be rounding
_EXPLAINED_HALF = 0.1  # where gradients, or their sums, are of half precision
_WELL_POSED = 1e-5  # smallest singular value of the sketches, relative to the greatest


@dataclass(frozen=True)
class Part:
    """A pass in a window's gradient."""

    of: Pass
    rank: int
    factor: float  # of the pass's gradient in the one that the step used, without clips


@dataclass(frozen=True)
class Fit:
    """What a step's gradient is made of."""

    window: Window
    parts: tuple[Part, ...]
    equal: bool  # all passes have one factor, or none
    earlier: float  # factor of what the step before left in `.grad`, relative to this window's
    by_hand: bool  # cleared passes are in it: the loop has kept their gradients

    @property
    def there(self) -> list[Part]:
        """The passes that are in it: the factor of another is rounding."""
        top = max(abs(part.factor) for part in self.parts)
        return [part for part in self.parts if abs(part.factor) >= NOTHING * top]


@lru_cache(maxsize=8)
def fits(view: View) -> tuple[Fit, ...]:
    """Those of the windows that are a sum of their passes."""
    found = []
    for window in view.windows:
        of_ranks = [
            (rank, one.windows[window.index])
            for rank, one in enumerate(view.ranks or (view,))
            if window.index < len(one.windows)
        ]
        fit = _fit(view, window, of_ranks)
        if fit is not None:
            found.append(fit)
    return tuple(found)


def _fit(view: View, window: Window, of_ranks: list[tuple[int, Window]]) -> Fit | None:
    step = window.step
    passes = [(rank, one) for rank, part in of_ranks for one in part.passes]
    if step.used is None or not passes or step.closure_calls > 1:
        return None
    since_clip = dropwhile(lambda event: not isinstance(event, Clipped), window.events)
    if view.optimizer.wrapped and any(isinstance(event, Pass) for event in since_clip):
        return None  # the wrapper has its sum elsewhere: it is not known what was clipped
    used = step.used / step.factor if step.factor else step.used
    own = torch.zeros(len(used), 1, dtype=torch.bool, device=used.device)
    own[list(view.optimizer.parameters)] = True
    columns = [
        torch.where(own, clips * one.gradient, 0.0)
        for _, part in of_ranks
        for one, clips in zip(part.passes, _clips_after(part, len(used))[:-1], strict=True)
    ]
    if not all(map(finite, (used, *columns))):
        return None
    tolerance = _EXPLAINED_HALF if view.record.half else _EXPLAINED
    left = None if window.previous is None else window.previous.left
    numbers = int(torch.stack([used, *columns]).any(0).sum())  # that factors have to explain
    every = list(range(len(passes)))
    kept, cleared = _since_clear(of_ranks)

    def explained(groups: list[list[int]], *extra: Sketch) -> Tensor | None:
        if 2 * (len(groups) + len(extra)) > numbers:
            return None
        sums = [torch.stack([columns[i] for i in group]).sum(0) for group in groups]
        return _solve([*sums, *extra], used, tolerance)

    def made(factors: dict[int, float], equal: bool, earlier: float = 0.0) -> Fit:
        parts = [Part(one, rank, factors.get(i, 0.0)) for i, (rank, one) in enumerate(passes)]
        top = max(map(abs, factors.values()))
        by_hand = any(abs(parts[i].factor) > tolerance * top for i in cleared)
        by_hand = by_hand and not view.optimizer.wrapped  # which sums elsewhere
        return Fit(window, tuple(parts), equal, earlier, by_hand)

    for group in (kept, every) if cleared else (every,):
        one = explained([group]) if group else None
        if one is not None:
            return made(dict.fromkeys(group, float(one[0])), True)
    if left is not None and finite(left):
        clips = _clips_after(window, len(used))[-1]
        two = explained([every], torch.where(own, clips * left, 0.0))
        if two is not None and abs(two[1]) > tolerance * abs(two[0]):
            return made(dict.fromkeys(every, float(two[0])), True, float(two[1] / two[0]))
    for some in (kept, every) if cleared else (every,):
        many = explained([[i] for i in some]) if some else None
        if many is not None:
            return made(dict(zip(some, many.tolist(), strict=True)), False)
    return None


def _clips_after(window: Window, parameters: int) -> list[Tensor]:
    """What clips multiplied each pass of a window with; at the end, what was there before it."""
    factors, after = torch.ones(parameters, 1, dtype=torch.float64, device="cpu"), []
    for event in reversed(window.events):
        if isinstance(event, Pass):
            after.append(factors.clone())
        elif isinstance(event, Clipped) and event.factor > 0:
            factors[list(event.parameters)] *= event.factor
    return [*reversed(after), factors]


def _since_clear(of_ranks: Sequence[tuple[int, Window]]) -> tuple[list[int], list[int]]:
    """The numbers of the passes after a window's last `zero_grad`, and of those before."""
    kept: list[int] = []
    cleared: list[int] = []
    number = 0
    for _, window in of_ranks:
        since: list[int] = []
        for event in window.events:
            if is_call(event, "zero_grad"):
                cleared += since
                since = []
            elif isinstance(event, Pass):
                since.append(number)
                number += 1
        kept += since
    return kept, cleared


def _solve(columns: list[Sketch], used: Sketch, tolerance: float) -> Tensor | None:
    """Factors with which columns sum up to a gradient; None where they do not, or several do."""
    matrix = torch.stack([column.flatten() for column in columns], dim=1)
    norms = matrix.norm(dim=0)
    target = used.flatten()
    small = bool((norms <= tolerance * norms.max()).any())  # whose factors rounding would decide
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
