"""What a loop really computes: plain PyTorch that looks on, and the definitions in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

NOTED = {  # calls that a loop makes: the class or module that has the function, its name there
    "backward": (Tensor, "backward"),
    "clip": (nn.utils, "clip_grad_norm_"),
    "scaler step": (GradScaler, "step"),
    "update": (GradScaler, "update"),
    "schedule": (LRScheduler, "step"),
}


def flat(tensors: Iterable[Tensor | None], like: Iterable[Tensor]) -> Tensor:
    """One float64 vector; zeros for None."""
    parts = [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, like, strict=True)]
    return torch.cat([part.detach().to_dense().double().flatten() for part in parts])


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer of torch that steps."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


@dataclass
class Step:
    """A step of the optimizer: parameters, the gradient that belongs to them, parameters."""

    before: Tensor
    gradient: Tensor
    after: Tensor


@dataclass
class Plain:
    """Stands where an audit does, and only writes down what happens."""

    model: nn.Module
    optimizer: Any
    windows: int = 4
    against: Any = None
    steps: list[Step] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # in their order, with "step"
    norms: list[float] = field(default_factory=list)  # that clip_grad_norm_ returned
    clipped: list[Tensor] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # bytes of the tensors saved for each pass

    def __enter__(self) -> Plain:
        self._stack = ExitStack()
        self._storages: dict[int, torch.UntypedStorage] = {}
        for name, (owner, attribute) in NOTED.items():
            self._stack.enter_context(self._noted(name, owner, attribute))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._stack.enter_context(hooks)
        optimizer = innermost(self.optimizer)
        before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure_truncation(self, *args: Any, **kwargs: Any) -> None:
        """Stand where an audit measures."""

    def _flat(self, of: Callable[[Tensor], Tensor | None] = lambda p: p) -> Tensor:
        parameters = list(self.model.parameters())
        return flat(map(of, parameters), parameters)

    def _before_step(self, *_: object) -> None:
        self.calls.append("step")
        self.steps.append(Step(self._flat(), self._flat(lambda p: p.grad), torch.empty(0)))

    def _after_step(self, *_: object) -> None:
        self.steps[-1].after = self._flat()

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage  # held, so that no other has its address
        return tensor

    def _noted(self, name: str, owner: Any, attribute: str) -> Any:
        real = getattr(owner, attribute)

        @functools.wraps(real)
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if name == "backward":
                theirs = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
                sizes = [s.nbytes() for at, s in self._storages.items() if at not in theirs]
                self.kept.append(sum(sizes))
                self._storages.clear()
            if name == "clip":
                first = list(first)
                self.clipped = first
            result = real(first, *args, **kwargs)
            self.norms += [float(result)] if name == "clip" else []
            return result

        return mock.patch.object(owner, attribute, call)

    def windows_of_calls(self) -> list[list[str]]:
        """What was called before each step."""
        windows: list[list[str]] = [[]]
        for call in self.calls:
            if call == "step":
                windows.append([])
            else:
                windows[-1].append(call)
        return windows

    def most(self, name: str) -> int:
        """How often something is called between two steps, at most."""
        return max(window.count(name) for window in self.windows_of_calls())

    def most_inside(self, name: str) -> int:
        """How often something is called between the first and last pass of a window, at most."""
        counts = [0]
        for window in self.windows_of_calls():
            passes = [i for i, call in enumerate(window) if call == "backward"]
            counts += [window[passes[0] : passes[-1]].count(name)] if passes else []
        return max(counts)


# The definitions. All in float64, each from parameters that a step was taken from.


def at(model: nn.Module, parameters: Tensor) -> nn.Module:
    """A float64 copy of a model, with these parameters."""
    model = copy.deepcopy(model).double()
    nn.utils.vector_to_parameters(parameters, model.parameters())
    return model


def gradients(
    model: nn.Module, step: Step, losses: Sequence[Callable[[nn.Module], Tensor]]
) -> Tensor:
    """The gradient of each loss, one a column, at the parameters of a step."""
    model = at(model, step.before)
    parameters = list(model.parameters())
    columns = []
    for loss in losses:
        grads = torch.autograd.grad(loss(model), parameters, allow_unused=True)
        columns.append(flat(grads, parameters))
    return torch.stack(columns, 1)


def weights(used: Tensor, columns: Tensor) -> Tensor:
    """With what the columns are multiplied in a gradient; an error where it is no sum of them."""
    solution = torch.linalg.lstsq(columns, used[:, None]).solution[:, 0]
    rest = (columns @ solution - used).norm() / used.norm()
    assert rest < 1e-4, f"the gradient is no sum of its micro-batches': {rest:.1e} is left"
    return solution


def distance(a: Tensor, b: Tensor) -> float:
    """Of the first from the second, relative to it."""
    return float((a - b).norm() / b.norm())
