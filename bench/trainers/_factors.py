"""What the steps of a trainer are made of: the factor of each micro-batch in the gradient of each.

`Weights` is a model whose mean loss of micro-batch k has the k-th unit vector as its gradient, so
that `.grad` at a step *is* the list of the factors. For a model that cannot be chosen, the factors
are found by least squares, from the gradients that its micro-batches have by themselves.

An epoch has ten micro-batches and a window four, so two are over at its end; two epochs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

WINDOW, BATCHES, EPOCHS = 4, 10, 2
ROWS = 2  # samples of a micro-batch
MAX_NORM = 0.1  # four factors that are equal are 0.05 then
INF = 5  # the micro-batch of the second window whose loss is infinite, where a scaler skips
STOP = 6  # micro-batches after which a run is stopped or saved: inside of the second window
LR = 1e-9  # moves nothing far; a schedule whose `step` was called n times makes it (n + 1) * LR
TOKENS = (1, 2, 3, 4, 4, 3, 2, 1, 1, 4)  # of the micro-batches, where they are unequal

Model = TypeVar("Model", bound=nn.Module)


class Weights(nn.Module):
    """One weight for each micro-batch, whose samples are its number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(BATCHES))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.w[numbers]


def loss_of(outputs: Tensor, targets: Tensor | None = None) -> Tensor:
    """A mean over samples of two classes with equal logits; the gradient of each sample is 1."""
    logits = torch.stack([2 * outputs.flatten(), torch.zeros_like(outputs.flatten())], dim=1)
    return nn.functional.cross_entropy(logits, torch.ones(len(logits), dtype=torch.long))


def numbers(rows: int = ROWS) -> list[int]:
    """The samples of an epoch, in order."""
    return [k for k in range(BATCHES) for _ in range(rows)]


def micro_batches(unequal: bool = False) -> list[Tensor]:
    """Those of an epoch: samples of each, or as many as it has tokens."""
    return [torch.full((TOKENS[k] if unequal else ROWS,), k) for k in range(BATCHES)]


def loader(unequal: bool = False, count: int | None = None) -> DataLoader[Tensor]:
    """Of the micro-batches as they are, in order; of the first `count`."""
    return DataLoader(micro_batches(unequal)[:count], batch_size=None)  # type: ignore[arg-type]


def epochs(batches: Iterable[Any], stop: int | None = None) -> Iterator[tuple[int, Any]]:
    """Of a loop by hand: each batch with its number in its epoch. Ends after `stop` batches."""
    for _ in range(EPOCHS):
        for i, batch in enumerate(batches):
            yield i, batch
            if i + 1 == stop:
                return


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate counts the calls of its `step`."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda calls: 1.0 + calls)


def wrapped(optimizer: nn.Module | torch.optim.Optimizer, **options: Any) -> Any:
    """accumext's wrapper of an optimizer, or of that of a model, in runs that show a cure."""
    import accumext  # no other run needs it

    if isinstance(optimizer, nn.Module):
        optimizer = optimizer_of(optimizer)
    return accumext.AccumulatingOptimizer(optimizer, window=WINDOW, **options)


class Seen:
    """What happened in a run, in order; hooks of torch call it.

    `watch` names the model. `gradients` are those of the micro-batches' mean losses, unit vectors
    unless they are given.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}  # that only some runs have
        self.copies: torch.optim.Optimizer | None = None  # steps on copies of the parameters
        self._parameters: list[Tensor] = []
        self._passes: list[int] = []  # since the last step
        self._count = 0
        self._gradients = dict(enumerate(torch.eye(BATCHES, dtype=torch.float64)))
        self._own: list[tuple[float, dict[int, Tensor]]] = []  # of each pass that `learn` saw
        self._handles: list[Any] = []

    def watch(self, model: Model, gradients: Sequence[Tensor] | None = None) -> Model:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if gradients is not None:
            self._gradients = dict(enumerate(g.double() for g in gradients))
        self._handles.append(self._parameters[0].register_hook(self._passed))
        return model

    def watch_losses(self, model: nn.Module) -> None:
        """The gradients are not known before: `learn` is given each micro-batch's mean loss."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_hook(partial(self._reached, index)))

    def learn(self, loss: Tensor) -> Tensor:
        """A pass from this loss: its gradient, over the factor that the trainer gives the loss."""
        if loss.requires_grad:
            loss.register_hook(self._began)
        return loss

    def _began(self, factor: Tensor) -> None:
        self._passes.append(self._count % BATCHES)
        self._count += 1
        self._own.append((float(factor), {}))

    def _reached(self, index: int, grad: Tensor) -> None:
        self._own[-1][1][index] = grad.detach().clone()

    def _learned(self) -> dict[int, Tensor]:
        """Of the passes since the last step."""
        found = {}
        for number, (factor, parts) in zip(self._passes, self._own[-len(self._passes) :]):
            whole = [parts.get(i, torch.zeros_like(p)) for i, p in enumerate(self._parameters)]
            found[number] = torch.cat([part.flatten().double() for part in whole]) / factor
        return found

    def __enter__(self) -> Seen:
        self._handles.append(register_optimizer_step_post_hook(self._stepping))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _passed(self, grad: Tensor) -> None:
        """A backward pass; its micro-batch is where its gradient is, else passes are counted."""
        found = grad.detach().flatten().nonzero()
        unit = grad.shape == (BATCHES,) and len(found) == 1
        self._passes.append(int(found) if unit else self._count % BATCHES)
        self._count += 1

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        groups: list[dict[str, Any]] = optimizer.param_groups
        stepped = [p for group in groups for p in group["params"]]
        if {id(p) for p in stepped} & {id(p) for p in self._parameters}:
            self.stepped(groups[0]["lr"])
        elif optimizer is self.copies:
            (flat,) = (p.grad for p in stepped)  # of all parameters, and padding
            self.stepped(groups[0]["lr"], flat[: sum(p.numel() for p in self._parameters)])

    def stepped(self, lr: float, used: Tensor | None = None) -> None:
        """A step, with the gradient that it used, if that is not in `.grad`."""
        used = self.gradient() if used is None else used
        count, norm = round(float(lr) / LR, 4), round(float(used.norm()), 5)
        entry = {"passes": self._passes, **self.factors(used), "lr": count}
        self.steps.append(entry | ({"norm": norm} if math.isfinite(norm) else {}))
        self._passes = []

    def gradient(self) -> Tensor:
        """What is in `.grad`."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return torch.cat([part.detach().flatten().double() for part in parts])

    def factors(self, used: Tensor) -> dict[str, Any]:
        """The micro-batches in a gradient, and the factor of each."""
        used = used.detach().flatten().double()
        if not used.isfinite().all():
            return {"micro_batches": [], "factors": [], "error": "inf or nan"}
        gradients = self._learned() if self._own else self._gradients
        if not gradients:
            return {"micro_batches": [], "factors": []}
        columns = torch.stack(list(gradients.values()), 1)
        found = torch.linalg.lstsq(columns, used[:, None]).solution.flatten()
        rest = float((columns @ found - used).norm() / used.norm().clamp_min(1e-30))
        factors = {k: round(float(f), 5) for k, f in zip(gradients, found) if abs(f) > 1e-4}
        entry = {"micro_batches": list(factors), "factors": list(factors.values())}
        return entry | ({"error": f"{rest:.2g} is of no micro-batch"} if rest > 1e-3 else {})

    def resume(self) -> None:
        """A run goes on in another process, or as if: its passes so far are those of the first."""
        self.facts["before_resuming"] = {"passes": self._passes, "steps": len(self.steps)}
        self._passes = []

    def result(self) -> dict[str, Any]:
        """Steps, and what is left after the last: passes, and what `.grad` holds."""
        left = self.factors(self.gradient()) if self._parameters else {}
        return {"steps": self.steps, "left": {"passes": self._passes, **left}, **self.facts}


Run = Callable[[Seen], None]
Rows = dict[str, dict[str, Run]]  # a row of the table, and its runs by their names
OPTIONS: dict[str, dict[str, Any]] = {  # of a program's `train`, for the runs that many have
    "plain": {},
    "clip": {"max_norm": MAX_NORM},
    "skipped": {"infinite": True},
    "unequal": {"unequal": True},
    "stopped": {"stop": STOP},
}


def runs(train: Callable[..., None], *names: str, **options: Any) -> dict[str, Run]:
    """The plain run and those that are named, all with these options too."""
    return {name: partial(train, **options, **OPTIONS[name]) for name in ("plain", *names)}


def attempt(run: Run, seen: Seen) -> dict[str, str]:
    """Runs it; its error in words, if it has one."""
    torch.manual_seed(0)
    with seen, contextlib.redirect_stdout(sys.stderr):
        try:
            run(seen)
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {}


def outcome(run: Run) -> dict[str, Any]:
    """What a run did, or its error."""
    seen = Seen()
    return attempt(run, seen) or seen.result()


def write(versions: dict[str, str], rows: Rows, of: Callable[[Run], dict[str, Any]]) -> None:
    """The command line of a program: what `of` finds of all its runs, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="a part of a row and a run, 'row: run'")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        row: {name: of(run) for name, run in runs.items() if args.only in f"{row}: {name}"}
        for row, runs in rows.items()
    }
    text = json.dumps({"versions": versions, "rows": found}, indent=1)
    print(text) if args.json is None else args.json.write_text(text, encoding="utf-8")


def main(package: str, rows: Rows) -> None:
    """What a program calls; `package` is named with its version."""
    write({name: metadata.version(name) for name in (package, "torch")}, rows, outcome)
