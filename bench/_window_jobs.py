"""Whole windows, from the first forward pass to the step: loops by hand, Accelerate, and ours.

Every contender has a model and an optimizer of its own, all with the same start, and computes the
same. It runs once more before it is timed: the first run after another contender's finds memory in
a state that a program with one loop never sees, and large tensors then cost page faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import _peers
import torch
from _timing import UNKNOWN, Contender, Job, Shape
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import accumext
from accumext._peak_memory import peak_memory

TRANSFORMER = "transformer"
LAYER = 12, 789_760  # tensors and elements of a layer of _transformer
SHAPES = (
    Shape(10**4, 10),
    Shape(2 * 10**6, 2000),
    Shape(3 * 10**7, 60),
    Shape(12 * LAYER[1], 12 * LAYER[0], TRANSFORMER),
)
QUICK_SHAPES = (Shape(10**4, 10), Shape(LAYER[1], LAYER[0], TRANSFORMER))

OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=1.0),
    "AdamW foreach": lambda parameters: AdamW(parameters, foreach=True),
    "AdamW fused": lambda parameters: AdamW(parameters, fused=True),
}
# Whole training steps, back to back
STEPS = 100
STEP_OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "SGD foreach": lambda parameters: SGD(parameters, lr=1e-3, foreach=True),
    "AdamW fused": OPTIMIZERS["AdamW fused"],
}
STEP_SHAPES = {
    "cpu": (Shape(20, 2), Shape(20_000, 2000)),
    "cuda": (Shape(20, 2), Shape(10**4, 10), Shape(20_000, 2000), Shape(10**8, 200)),
}
MAX_NORM = 1.0  # less than any of these gradients has


class Model(NamedTuple):
    """Parameters, and the loss of each micro-batch of a window."""

    parameters: Sequence[Tensor]
    loss: Callable[[int], Tensor]


class Case(NamedTuple):
    """The settings that the contenders of a job have in common."""

    shape: Shape
    device: torch.device
    kind: str  # of optimizer
    window: int
    scaled: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        parts = [f"window of {self.window}", self.kind]
        parts += ["scaler"] * self.scaled + ["bf16"] * (self.dtype == torch.bfloat16)
        return ", ".join(parts + [TRANSFORMER] * self.is_transformer)

    @property
    def is_transformer(self) -> bool:
        return self.shape.role == TRANSFORMER

    def model(self) -> Model:
        """Make the same model in every call."""
        torch.manual_seed(0)
        return _transformer(self) if self.is_transformer else _products(self)

    def scaler(self) -> GradScaler | None:
        if not self.scaled:
            return None
        never = 2**31 - 1
        return GradScaler(self.device.type, init_scale=1024.0, growth_interval=never)


def window_jobs(shape: Shape, device: torch.device, quick: bool = False) -> Iterator[Job]:
    windows = (1, 4) if quick else (1, 4, 16)
    for kind in OPTIMIZERS:
        for window in windows:
            yield _window(Case(shape, device, kind, window))
        yield _window(Case(shape, device, kind, 4, scaled=True))
    if shape.role != TRANSFORMER:  # whose products in half precision take a CPU long
        yield _window(Case(shape, device, "AdamW fused", 4, dtype=torch.bfloat16))


def _window(case: Case) -> Job:
    loops = {
        "by hand": _by_hand,
        "accumext, backward": _backward,
        "accumext, usual loop": _usual_loop,
    }
    if case.dtype == torch.bfloat16:
        loops["accumext, in backward"] = _in_backward
    if _peers.installed("accelerate"):
        loops["Accelerate"] = _accelerate
    contenders = {name: _contender(case, loop) for name, loop in loops.items()}
    return Job(str(case), case.shape, contenders, again=True)


def _contender(case: Case, loop: Callable[..., Callable[[], Any]]) -> Contender:
    model = case.model()
    parameters = model.parameters
    start = [parameter.detach().clone() for parameter in parameters]
    optimizer = OPTIMIZERS[case.kind](parameters)
    run = loop(model, optimizer, case.scaler(), case.window)

    def outcome(_: object) -> list[Tensor]:
        """Return AdamW's mean of gradients, or how far SGD has moved along them."""
        means = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
        if means:
            return means
        moved = [parameter.detach() - was for parameter, was in zip(parameters, start)]
        return [torch.cat([tensor.flatten() for tensor in moved])]

    def windows() -> None:
        """Run a window; twice if it has one micro-batch, which may leave gradients to the next."""
        for _ in range(1 + (case.window == 1)):
            run()

    def sets() -> float:
        for parameter in parameters:
            parameter.grad = None
        return peak_memory(windows, case.device) / sum(p.nbytes for p in parameters)

    return Contender(run, UNKNOWN, outcome, sets)


def step_jobs(shape: Shape, device: torch.device) -> Iterator[Job]:
    """Yield jobs of many steps with a window of one, with a clip and without."""
    for kind in STEP_OPTIMIZERS:
        for max_norm in (None, MAX_NORM):
            name = f"{STEPS} steps, {kind}, {'no clip' if max_norm is None else 'clip'}"
            yield Job(name, shape, _steps(shape, device, kind, max_norm), again=True)


def _steps(
    shape: Shape, device: torch.device, kind: str, max_norm: float | None
) -> dict[str, Contender]:
    """Return the loop by hand, and ours, which has one wrapper: several would look at each other's
    gradients."""
    mine, theirs = (
        [nn.Parameter(torch.zeros(size, device=device)) for size in shape.sizes()] for _ in range(2)
    )
    optimizer = STEP_OPTIMIZERS[kind](theirs)
    opt = accumext.AccumulatingOptimizer(STEP_OPTIMIZERS[kind](mine), max_norm=max_norm)

    def by_hand() -> None:
        for _ in range(STEPS):
            torch.cat(theirs).sum().backward()
            if max_norm is not None:
                clip_grad_norm_(theirs, max_norm, foreach=True)
            optimizer.step()
            optimizer.zero_grad()

    def ours(policy: Any) -> None:
        opt.on_nonfinite = policy
        for _ in range(STEPS):
            opt.backward(torch.cat(mine).sum())
            opt.step()

    return {
        "by hand": Contender(by_hand, UNKNOWN, lambda _: [torch.cat(theirs).detach()]),
        "accumext": Contender(
            lambda: ours("skip_window"), UNKNOWN, lambda _: [torch.cat(mine).detach()]
        ),
        'accumext, "step", unchecked': Contender(lambda: ours("step"), UNKNOWN, None),
    }


# The loops. Each returns what runs a window.


def _by_hand(
    model: Model, optimizer: Optimizer, scaler: GradScaler | None, window: int
) -> Callable[[], Any]:
    def run() -> None:
        for i in range(window):
            _scaled(scaler, model.loss(i) / window).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters, MAX_NORM)
        _step(scaler, optimizer)
        optimizer.zero_grad()

    return run


def _accelerate(
    model: Model, optimizer: Optimizer, scaler: GradScaler | None, window: int
) -> Callable[[], Any]:
    accelerator = _peers.installed("accelerate").Accelerator(cpu=not model.parameters[0].is_cuda)
    accelerator.scaler = scaler
    prepared = accelerator.prepare(optimizer)

    def run() -> None:
        # Accelerate has one such number per process, and it is for this loop alone.
        accelerator.gradient_accumulation_steps = window
        for i in range(window):
            with accelerator.accumulate():
                accelerator.backward(model.loss(i))
                if accelerator.sync_gradients:
                    if scaler is not None:  # which it unscales itself only under fp16 autocast
                        scaler.unscale_(optimizer)
                    accelerator.clip_grad_norm_(model.parameters, MAX_NORM)
                prepared.step()
                prepared.zero_grad()
        accelerator.gradient_accumulation_steps = 1

    return run


def _backward(
    model: Model, optimizer: Optimizer, scaler: GradScaler | None, window: int, **options: Any
) -> Callable[[], Any]:
    opt = accumext.AccumulatingOptimizer(
        optimizer, window=window, max_norm=MAX_NORM, scaler=scaler, **options
    )

    def run() -> None:
        for i in range(window):
            opt.backward(model.loss(i))
            opt.step()

    return run


def _in_backward(*args: Any) -> Callable[[], Any]:
    return _backward(*args, accumulate_in_backward=True)


def _usual_loop(
    model: Model, optimizer: Optimizer, scaler: GradScaler | None, window: int
) -> Callable[[], Any]:
    opt = accumext.AccumulatingOptimizer(optimizer, window=window, max_norm=MAX_NORM)

    def run() -> None:
        for i in range(window):
            _scaled(scaler, model.loss(i)).backward()
            _step(scaler, opt)
            opt.zero_grad()

    return run


def _scaled(scaler: GradScaler | None, loss: Tensor) -> Tensor:
    return loss if scaler is None else scaler.scale(loss)


def _step(scaler: GradScaler | None, optimizer: Optimizer) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


# The models


def _products(case: Case) -> Model:
    """Make one product for each parameter, which takes next to nothing besides its gradient."""
    sizes = case.shape.sizes()
    options = {"device": case.device, "dtype": case.dtype}
    parameters = [nn.Parameter(torch.zeros(size, **options)) for size in sizes]
    noise = torch.randn(max(sizes) + 16 * case.window, **options)
    batches = [{n: noise[16 * i :][:n] for n in set(sizes)} for i in range(case.window)]

    def loss(i: int) -> Tensor:
        products = [p @ batches[i][size] for p, size in zip(parameters, sizes)]
        return torch.stack(products).sum()

    return Model(parameters, loss)


def _transformer(case: Case) -> Model:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, case.shape.tensors // LAYER[0])
    encoder.to(case.device, case.dtype)
    options = {"device": case.device, "dtype": case.dtype}
    inputs, noise = torch.randn(2, case.window, 2, 8, 256, **options)
    return Model(list(encoder.parameters()), lambda i: (encoder(inputs[i]) * noise[i]).sum())
