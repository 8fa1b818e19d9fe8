"""The modules of a loop, as far as they need not be named: found among all that are alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from accumext.auditing._followed import parameters_of
from accumext.auditing._passes import stands_for
from accumext.auditing._sketch import sample

_ALONG = 0.99  # cosine of an average's way and of that to the model


def parameters_in(module: nn.Module) -> list[Tensor]:
    """Those of a module; none of one that is not complete, or not as others are."""
    try:
        return list(nn.Module.parameters(module))
    except Exception:  # any object that is alive may be asked
        return []


def modules_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The modules that have some parameters: each the one with most of those that are left, and in
    no other."""
    left = {id(stands_for(tensor)) for tensor in parameters}
    alive = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    have = [(module, {id(p) for p in parameters_in(module)}) for module in alive]
    have = [(module, ids) for module, ids in have if left & ids]
    found = []
    while left:
        sizes = [(len(left & ids), sum(1 for _ in module.modules())) for module, ids in have]
        if not sizes or not max(sizes)[0]:
            break
        best, ids = have[sizes.index(max(sizes))]
        found.append(best)
        left -= ids
    return found


def optimized() -> Iterator[Tensor]:
    """The parameters of all optimizers that are alive."""
    for one in gc.get_objects():
        if issubclass(type(one), Optimizer):
            yield from parameters_of(getattr(one, "param_groups", []))


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """By name; those that count in training."""
    every = dict(model.named_modules())
    return {
        name: module
        for name, module in every.items()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }


class Averages:
    """Copies of what is trained, such as a teacher or a moving average."""

    def __init__(self, models: Sequence[nn.Module], trained: Sequence[Tensor]) -> None:
        own = set(map(id, trained))
        inside = [(m, ids) for model in models for m in model.modules() if (ids := _ids(m)) & own]
        self._model: list[Tensor] = []
        self._copies: list[list[Tensor]] = []
        if inside:  # the smallest module with all of them
            best = max(inside[::-1], key=lambda case: (len(case[1] & own), -len(case[1])))
            model = best[0]
            self._model = parameters_in(model)
            others = [m for m in gc.get_referrers(type(model)) if type(m) is type(model)]
            shapes = _shapes(self._model)
            copies = [c for m in others if not _ids(c := parameters_in(m)) & own]
            self._copies = [c for c in copies if _shapes(c) == shapes]
        self._last = self._samples()

    def since(self, before: Averages | None) -> Averages:
        """Of copies that are the same as before, what they were when they were looked at last."""
        if before is not None:
            known = {id(copy[0]): old for copy, old in zip(before._copies, before._last) if copy}
            pairs = zip(self._copies, self._last, strict=True)
            self._last = [known.get(id(copy[0]), new) for copy, new in pairs]
        return self

    def _samples(self) -> list[Tensor]:
        return [sample(copy) for copy in self._copies]

    def look(self) -> Callable[[frozenset[int]], bool]:
        """What tells whether a copy has moved towards the model since the last look; not of one
        that an optimizer has, by the ids of what optimizers have."""
        model, before, self._last = sample(self._model), self._last, self._samples()
        each = list(zip(self._copies, before, self._last, strict=True))
        return lambda optimized: any(
            _has_moved(old, new, model) for copy, old, new in each if not _ids(copy) & optimized
        )


def _ids(module: Any) -> set[int]:
    return {id(p) for p in (module if isinstance(module, list) else parameters_in(module))}


def _shapes(tensors: list[Tensor]) -> list[Any]:
    return [None if is_lazy(tensor) else tensor.shape for tensor in tensors]


def _has_moved(old: Tensor, new: Tensor, model: Tensor) -> bool:
    way, whole = new - old, model.to(old.device) - old
    return bool(way.any()) and bool(way @ whole > _ALONG * way.norm() * whole.norm())
