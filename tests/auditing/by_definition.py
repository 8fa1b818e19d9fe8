"""What a loop really computes: plain PyTorch that looks on, and sizes of mistakes in float64."""

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import audited
import torch
from audited import of_rows
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

Size = Callable[["Plain"], float]


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
    """Of the optimizer: the parameters before it, and the gradient that belongs to them."""

    before: Tensor
    gradient: Tensor


@dataclass
class Plain:
    """Stands where an audit does, and only writes down what happens."""

    model: nn.Module
    optimizer: Any
    windows: int = 4
    against: Any = None
    steps: list[Step] = field(default_factory=list)
    scaler_steps: int = 0
    kept: list[int] = field(default_factory=list)  # bytes of the tensors saved for each pass

    def __enter__(self) -> "Plain":
        self._stack = ExitStack()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._stack.enter_context(self._noted(Tensor, "backward", self._before_backward))
        self._stack.enter_context(self._noted(GradScaler, "step", self._before_scaler_step))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._stack.enter_context(hooks)
        before = innermost(self.optimizer).register_step_pre_hook(self._before_step)
        self._stack.callback(before.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure_truncation(self, *args: Any, **kwargs: Any) -> None:
        """Stand where an audit measures."""

    def _before_step(self, *_: object) -> None:
        parameters = list(self.model.parameters())
        grads = flat([p.grad for p in parameters], parameters)
        self.steps.append(Step(flat(parameters, parameters), grads))

    def _before_scaler_step(self) -> None:
        self.scaler_steps += 1

    def _before_backward(self) -> None:
        theirs = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        self.kept.append(sum(s.nbytes() for at, s in self._storages.items() if at not in theirs))
        self._storages.clear()

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage  # held, so that no other has its address
        return tensor

    def _noted(self, owner: Any, name: str, note: Callable[[], None]) -> Any:
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*args, **kwargs):
            note()
            return real(*args, **kwargs)

        return mock.patch.object(owner, name, call)


# --- the sizes of mistakes that are no round numbers ----------------------------------------------


def at(model: nn.Module, parameters: Tensor) -> nn.Module:
    """A float64 copy of a model, with these parameters."""
    model = copy.deepcopy(model).double()
    nn.utils.vector_to_parameters(parameters, model.parameters())
    return model


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    parameters = list(model.parameters())
    return flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)


def distance(a: Tensor, b: Tensor) -> float:
    """Of the first from the second, relative to it."""
    return float((a - b).norm() / b.norm())


def of_the_exact_gradient(cut: int) -> Size:
    """The distance of a decoder's gradient whose state is detached every so many tokens."""

    def of(plain):
        model, (targets, hidden) = at(plain.model, plain.steps[0].before), audited.sentences(1)[0]
        truncated, exact = (
            gradient(model, audited.decoded(model, targets, hidden.double(), every))
            for every in (cut, None)
        )
        return distance(truncated, exact)

    return of


def of_the_sum_in_float32(many: int) -> Size:
    """Every pass by itself, in bfloat16; their sum in float64; and the sum that was stepped on."""

    def of(plain):
        model = at(plain.model, plain.steps[0].before).bfloat16()
        losses = (of_rows(model, x.bfloat16(), y) / many for x, y in audited.rows(many))
        return distance(plain.steps[0].gradient, sum(gradient(model, loss) for loss in losses))

    return of


def first_that_differs(plain: Plain) -> float:
    """A window has one pass here."""
    pairs = zip(plain.steps, plain.against.steps, strict=True)
    return 1.0 + [torch.equal(a.gradient, b.gradient) for a, b in pairs].index(False)
