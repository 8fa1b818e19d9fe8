"""With which factor each pass of a window is in the gradient that its step used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile

import torch
from torch import Tensor

from accumext.audit._events import Call, Clipped, Pass, Record, Sketch, Window, windows_of

_EXPLAINED = 1e-3  # of the gradient may be rounding
_EXPLAINED_HALF = 0.1  # where gradients, or their sums, are of half precision
_WELL_POSED = 1e-5  # smallest singular value of the sketches, relative to the greatest


@dataclass(frozen=True)
class Share:
    """A pass in a window's gradient."""

    of: Pass
    rank: int
    factor: float  # of the pass's gradient in the one that the step used, without clips


@dataclass(frozen=True)
class Fit:
    """What a step's gradient is made of."""

    window: Window
    shares: tuple[Share, ...]
    equal: bool  # all passes have one factor
    earlier: float  # factor of what the step before left in `.grad`, relative to this window's


@lru_cache(maxsize=2)
def fits(record: Record) -> tuple[Fit, ...]:
    """Those of the windows that are a sum of their passes."""
    ranks = [windows_of(rank) for rank in record.ranks] or [windows_of(record)]
    found = []
    for window in windows_of(record):
        of_ranks = [
            (rank, windows[window.index])
            for rank, windows in enumerate(ranks)
            if window.index < len(windows)
        ]
        fit = _fit(record, window, of_ranks)
        if fit is not None:
            found.append(fit)
    return tuple(found)


def _fit(record: Record, window: Window, of_ranks: list[tuple[int, Window]]) -> Fit | None:
    step = window.step
    passes = [(rank, one) for rank, part in of_ranks for one in part.passes]
    if step.used is None or not passes or step.closure_calls > 1:
        return None
    since_clip = dropwhile(lambda event: not isinstance(event, Clipped), window.events)
    if record.wrapped and any(isinstance(event, Pass) for event in since_clip):
        return None  # the wrapper has its sum elsewhere: it is not known what was clipped
    used = step.used / step.factor if step.factor else step.used
    own = torch.zeros(len(used), 1, dtype=torch.bool, device=used.device)
    own[list(record.audited)] = True
    columns = [
        torch.where(own, clips * one.gradient, 0.0)
        for _, part in of_ranks
        for one, clips in zip(part.passes, _clips_after(part, len(used))[:-1], strict=True)
    ]
    if not all(map(finite, (used, *columns))):
        return None
    tolerance = _EXPLAINED_HALF if record.half else _EXPLAINED
    left = None if window.previous is None else window.previous.left
    numbers = int(torch.stack([used, *columns]).any(0).sum())  # that factors have to explain

    def explained(groups: list[list[int]], extra: list[Sketch]) -> Tensor | None:
        if 2 * (len(groups) + len(extra)) > numbers:
            return None
        sums = [torch.stack([columns[i] for i in group]).sum(0) for group in groups]
        return _solve([*sums, *extra], used, tolerance)

    every, number = list(range(len(passes))), len(passes)
    one = explained([every], [])
    if one is not None:
        return _made(window, passes, [float(one[0])] * number, True, 0.0)
    if left is not None and finite(left):
        clips = _clips_after(window, len(used))[-1]
        two = explained([every], [torch.where(own, clips * left, 0.0)])
        if two is not None and abs(two[1]) > tolerance * abs(two[0]):
            return _made(window, passes, [float(two[0])] * number, True, float(two[1] / two[0]))
    for groups in (_between_clears(window, passes), [[i] for i in every]):
        many = explained(groups, [])
        if many is not None:
            factors = [0.0] * number
            for group, factor in zip(groups, many.tolist(), strict=True):
                for i in group:
                    factors[i] = factor
            return _made(window, passes, factors, False, 0.0)
    return None


def _made(
    window: Window,
    passes: list[tuple[int, Pass]],
    factors: list[float],
    equal: bool,
    earlier: float,
) -> Fit:
    shares = [Share(one, rank, f) for (rank, one), f in zip(passes, factors, strict=True)]
    return Fit(window, tuple(shares), equal, earlier)


def _clips_after(window: Window, parameters: int) -> list[Tensor]:
    """What clips multiplied each pass of a window with; at the end, what was there before it."""
    factors, after = torch.ones(parameters, 1, dtype=torch.float64, device="cpu"), []
    for event in reversed(window.events):
        if isinstance(event, Pass):
            after.append(factors.clone())
        elif isinstance(event, Clipped) and event.factor > 0:
            factors[list(event.parameters)] *= event.factor
    return [*reversed(after), factors]


def _between_clears(window: Window, passes: list[tuple[int, Pass]]) -> list[list[int]]:
    """The passes, in groups that no `zero_grad` divides."""
    mine = {id(one): i for i, (_, one) in enumerate(passes)}
    groups: list[list[int]] = [[]]
    for event in window.events:
        if isinstance(event, Call) and event.name == "zero_grad":
            groups.append([])
        elif id(event) in mine:
            groups[-1].append(mine[id(event)])
    listed = {i for group in groups for i in group}
    groups.append([i for i in mine.values() if i not in listed])  # of other processes
    return [group for group in groups if group]


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
