"""What a loop really computes: plain PyTorch that looks on, and the definitions in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import audited
import torch
from audited import Batch, N, of_rows
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


# --- gradients of a step's parameters, in float64 -------------------------------------------------


def at(model: nn.Module, parameters: Tensor) -> nn.Module:
    """A float64 copy of a model, with these parameters."""
    model = copy.deepcopy(model).double()
    nn.utils.vector_to_parameters(parameters, model.parameters())
    return model


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    parameters = list(model.parameters())
    return flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)


def gradients(
    model: nn.Module,
    before: Tensor,
    batches: Sequence[Batch],
    of: Callable[..., Tensor] = of_rows,
    reduction: str = "mean",
) -> Tensor:
    """The gradient of each micro-batch's loss, one a column."""
    model = at(model, before)
    return torch.stack(
        [gradient(model, of(model, x.double(), y, reduction)) for x, y in batches], 1
    )


def weights(used: Tensor, columns: Tensor) -> Tensor:
    """With what the columns are multiplied in a gradient; an error where it is no sum of them."""
    solution = torch.linalg.lstsq(columns, used[:, None]).solution[:, 0]
    rest = (columns @ solution - used).norm() / used.norm()
    assert rest < 1e-4, f"the gradient is no sum of its micro-batches': {rest:.1e} is left"
    return solution


def distance(a: Tensor, b: Tensor) -> float:
    """Of the first from the second, relative to it."""
    return float((a - b).norm() / b.norm())


def in_steps(plain: Plain, batches: Sequence[Batch], *how: Any) -> list[Tensor]:
    """What each micro-batch of a window is multiplied with in the gradient of its step."""
    pairs = zip(plain.steps, audited.windows_of(batches), strict=True)
    return [weights(s.gradient, gradients(plain.model, s.before, some, *how)) for s, some in pairs]


def equal(used: Tensor) -> Tensor:
    """The sum of factors that are all the same."""
    torch.testing.assert_close(used, used.mean().expand_as(used), rtol=1e-3, atol=0)
    return used.sum()


# --- the sizes of mistakes ------------------------------------------------------------------------


def times_the_mean(batches: Sequence[Batch], window: int = 0) -> Size:
    """The factor of the mean over the micro-batches."""
    return lambda plain: float(equal(in_steps(plain, batches)[window]))


def times_the_mean_by_the_parameters(plain: Plain) -> float:
    """From how far a step of rate 1 has gone, since the sums are the wrapper's own."""
    first = plain.steps[0]
    columns = gradients(plain.model, first.before, audited.rows()[:N])
    return float(equal(weights(first.before - first.after, columns)))


def ratio_of_weights(batches: Sequence[Batch], of: Any = of_rows) -> Size:
    """Of two terms of the losses' sums, at most."""

    def largest(plain: Plain) -> float:
        return max(float(u.max() / u.min()) for u in in_steps(plain, batches, of, "sum"))

    return largest


def absent(batches: Sequence[Batch]) -> Size:
    """Micro-batches of a window whose gradient is not in the step."""
    return lambda plain: float(max((u.abs() < 1e-4).sum() for u in in_steps(plain, batches)))


def steps_that_one_is_in(plain: Plain) -> float:
    """A step's gradient is a sum over all micro-batches so far."""
    pairs = zip(plain.steps, audited.windows_of(audited.rows()), strict=True)
    columns = [gradients(plain.model, step.before, some) for step, some in pairs]
    counts = torch.zeros(N)
    for number, step in enumerate(plain.steps, 1):
        used = weights(step.gradient, torch.cat(columns[:number], 1))
        counts += (used[:N] > 1e-4).double()
    return float(counts.max())


def times_scale_in_the_norm(plain: Plain) -> float:
    grads = gradients(plain.model, plain.steps[0].before, audited.rows()[:N])
    return plain.norms[0] / float(grads.mean(1).norm())


def held(plain: Plain) -> set[Tensor]:
    return {p for group in plain.optimizer.param_groups for p in group["params"]}


def clipped_but_not_trained(plain: Plain) -> float:
    return float(len(set(plain.clipped) - held(plain)))


def in_no_optimizer(plain: Plain) -> float:
    return float(len(set(plain.model.parameters()) - held(plain)))


def not_finite(plain: Plain) -> float:
    return float(sum(not step.gradient.isfinite().all() for step in plain.steps))


def of_the_exact_gradient(cut: int) -> Size:
    """The distance of a decoder's gradient whose state is detached every so many tokens."""

    def of(plain: Plain) -> float:
        model, (targets, hidden) = at(plain.model, plain.steps[0].before), audited.sentences(1)[0]
        truncated, exact = (
            gradient(model, audited.decoded(model, targets, hidden.double(), every))
            for every in (cut, None)
        )
        return distance(truncated, exact)

    return of


def of_the_sum_in_float32(many: int) -> Size:
    """Every pass by itself, in bfloat16; their sum in float64; and the sum that was stepped on."""

    def of(plain: Plain) -> float:
        model = at(plain.model, plain.steps[0].before).bfloat16()
        losses = (of_rows(model, x.bfloat16(), y) / many for x, y in audited.rows(many))
        return distance(plain.steps[0].gradient, sum(gradient(model, loss) for loss in losses))

    return of


def without_gradient(plain: Plain) -> float:
    """Tensors of the optimizer whose gradient is zero, or is not there, in all steps."""
    sizes = [p.numel() for p in plain.model.parameters()]
    parts = zip(*(step.gradient.split(sizes) for step in plain.steps), strict=True)
    return float(sum(all(not g.any() for g in of_one) for of_one in parts))


def first_that_differs(plain: Plain) -> float:
    """A window has one pass here."""
    pairs = zip(plain.steps, plain.against.steps, strict=True)
    return 1.0 + [torch.equal(a.gradient, b.gradient) for a, b in pairs].index(False)
