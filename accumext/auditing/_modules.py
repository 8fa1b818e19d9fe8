"""The modules of a loop, found among all living objects, so that nobody has to name them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from accumext.auditing._passes import stands_for
from accumext.auditing._sketch import sample

_ALONG = 0.99  # least cosine between an average's move and the direction of the model


def parameters_in(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module; none if it is unusual or not fully constructed."""
    try:
        return list(nn.Module.parameters(module))
    except Exception:  # objects in any state come here
        return []


def replicas_of(parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel modules that have some of these parameters: several, if a
    loop has one for each part of its model."""
    known = set(map(id, parameters))
    alive = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return [one for one in alive if known & {id(p) for p in parameters_in(one)}]


def modules_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the modules that have these parameters: time and again the one with most of those
    that no module has yet, and of several such the outermost."""
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


def optimizers() -> list[Optimizer]:
    """Return all optimizers that are alive."""
    return [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norms that track running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }


class Averages:
    """Copies of the trained model, such as a teacher or a moving average."""

    def __init__(self) -> None:
        self._model: list[Tensor] = []
        self._copies: list[tuple[list[Tensor], Tensor]] = []  # with samples of the last look
        self._found = (0, 0)  # the id of the model, and the references to its class

    def find(self, models: Iterable[nn.Module], trained: Iterable[Tensor]) -> None:
        """Find the smallest module with most of the trained parameters, and others like it."""
        own, known = set(map(id, trained)), {id(copy[0]): old for copy, old in self._copies}
        inside = [(m, ids) for model in models for m in model.modules() if (ids := _ids(m)) & own]
        if inside:
            model, _ = max(inside[::-1], key=lambda case: (len(case[1] & own), -len(case[1])))
            # A new instance adds a reference to its class: less work than to look at all objects.
            found = id(model), sys.getrefcount(type(model))
            if found == self._found:
                return
            self._found, self._model, self._copies = found, parameters_in(model), []
            shapes = _shapes(self._model)
            others = [m for m in gc.get_referrers(type(model)) if type(m) is type(model)]
            for copy in map(parameters_in, others):
                if not _ids(copy) & own and _shapes(copy) == shapes:
                    now = sample(copy)
                    last = known.get(id(copy[0]), now)  # may be of another part of the model
                    self._copies.append((copy, last if last.shape == now.shape else now))

    def look(self) -> Callable[[frozenset[int]], bool] | None:
        """Return a function that tells whether a copy moved towards the model since the last look.
        It gets the ids of optimized parameters: such copies do not count. None without copies."""
        if not self._copies:
            return None
        model, before = sample(self._model), self._copies
        after = self._copies = [(copy, sample(copy)) for copy, _ in before]
        return lambda optimized: any(
            _has_moved(old, new, model)
            for (copy, old), (_, new) in zip(before, after, strict=True)
            if not _ids(copy) & optimized
        )


def _ids(module: nn.Module | list[Tensor]) -> set[int]:
    return {id(p) for p in (module if isinstance(module, list) else parameters_in(module))}


def _shapes(tensors: list[Tensor]) -> list[Any]:
    return [None if is_lazy(tensor) else tensor.shape for tensor in tensors]


def _has_moved(old: Tensor, new: Tensor, model: Tensor) -> bool:
    way, whole = new - old, model.to(old.device) - old
    return bool(way.any()) and bool(way @ whole > _ALONG * way.norm() * whole.norm())
