"""The same batches and tokens through accumext, plain PyTorch, and a backward pass per token."""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder import DecodeOutput
from accumext.demo.memory import peak_memory
from accumext.demo.model import Batch, WordModel
from accumext.demo.progress import Progress
from accumext.demo.record import MemoryPoint, Record, Row, Settings
from accumext.demo.train import teacher_share

_EXACT_COLUMNS = 2  # of a batch at once in float64, to bound its memory
_CURVE = (1, 2, 4, 6)  # eighths of the steps at which memory is measured, besides all of them


class Case(NamedTuple):
    """A batch and the tokens that accumext feeds in it."""

    batch: Batch
    inputs: Tensor  # int64 [T, B]
    seed: int  # of the coins of scheduled feedback


def with_accumext(model: WordModel, case: Case, settings: Settings) -> Tensor:
    """The decoder finds its own tokens, step by step; exact gradients."""
    out = _decode(model, case.batch, settings, case.seed)
    out.loss.backward()
    return out.loss.detach()


def with_plain_pytorch(model: WordModel, case: Case, settings: Settings) -> Tensor:
    """The losses of all steps in one graph, one backward pass; exact gradients."""
    state, losses = model.encode(case.batch), []
    for token, target in zip(case.inputs, case.batch.targets, strict=True):
        state = model.cell(model.embedding(token), state)
        losses.append(F.cross_entropy(model.head(state), target))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach()


def with_backward_per_token(model: WordModel, case: Case, settings: Settings) -> Tensor:
    """A backward pass after every step, and a detached state: nothing flows back in time."""
    state, total = model.encode(case.batch), torch.zeros((), device=case.inputs.device)
    for token, target in zip(case.inputs, case.batch.targets, strict=True):
        state = model.cell(model.embedding(token), state)
        loss = F.cross_entropy(model.head(state), target) / len(case.inputs)
        loss.backward()
        state = state.detach()
        total += loss.detach()
    return total


MODES: dict[str, Callable[[WordModel, Case, Settings], Tensor]] = {
    "accumext.decode_loss": with_accumext,
    "plain PyTorch": with_plain_pytorch,
    "backward per token": with_backward_per_token,
}


def compare(
    model: WordModel, batches: list[Batch], settings: Settings, record: Record, curve: bool = False
) -> None:
    """Measure every mode over the batches, in float32; each row is added as soon as it is complete.

    accumext predicts as it goes. The other two replay the tokens it fed, which spares them the
    argmax. Gradients are those of the first batch, and exact is plain autograd in float64 on it.
    The modes take turns, so that whatever else the machine does slows all of them alike.
    With `curve`, the peak memory of each mode on the first steps of that batch as well.
    """
    lengths = curve_lengths(settings.length) if curve else []
    slices = -(-settings.batch // _EXACT_COLUMNS)
    pieces = len(batches) + slices + len(MODES) * (2 + len(batches) + len(lengths))
    losses: dict[str, list[float]] = {name: [] for name in MODES}
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    distance: dict[str, float] = {}
    device = batches[0].targets.device
    cases: list[Case] = []
    allow_tf32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with Progress("comparing", pieces) as progress, allow_tf32:
        for seed, batch in enumerate(batches):
            progress.begin(f"tokens of batch {seed + 1}")
            with torch.no_grad():
                cases.append(Case(batch, _decode(model, batch, settings, seed).inputs, seed))
            progress.end()
        exact = _exact_gradients(model, cases[0], progress)
        for name, run in MODES.items():
            progress.begin(f"{name}, gradients")
            model.zero_grad()
            run(model, cases[0], settings)
            distance[name] = relative_distance(_gradients(model), exact)
            progress.end()
        for n, case in enumerate(cases, 1):
            for name, run in MODES.items():
                progress.begin(f"{name}, time of batch {n}")
                model.zero_grad()
                begin = time.perf_counter()
                losses[name].append(float(run(model, case, settings)))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds[name].append(time.perf_counter() - begin)
                progress.end()
        for name in MODES:
            progress.begin(f"{name}, memory")
            row = Row(
                name=name,
                loss=statistics.fmean(losses[name]),
                seconds=statistics.median(seconds[name]),
                peak_memory=_peak_memory(model, name, cases[0], settings),
                gradient_distance=distance[name],
            )
            record.comparison.append(row)
            progress.end()
        for length in lengths:
            for name in MODES:
                progress.begin(f"{name}, memory at T={length}")
                peak = _peak_memory(model, name, _first_steps(cases[0], length), settings)
                record.memory.append(MemoryPoint(name, length, peak))
                progress.end()
        if curve:
            for row in record.comparison:
                record.memory.append(MemoryPoint(row.name, settings.length, row.peak_memory))
    model.zero_grad()


def curve_lengths(length: int) -> list[int]:
    """Numbers of steps below `length` at which the memory curve is measured."""
    return sorted({max(1, length * n // 8) for n in _CURVE} - {length})


def relative_distance(gradients: list[Tensor], exact: list[Tensor]) -> float:
    """|g - exact| / |exact| over all parameters together."""
    pairs = zip(gradients, exact, strict=True)
    apart = sum(float((g.double() - e).square().sum()) for g, e in pairs)
    return math.sqrt(apart / sum(float(e.square().sum()) for e in exact))


def _decode(model: WordModel, batch: Batch, settings: Settings, seed: int) -> DecodeOutput:
    generator = torch.Generator(batch.targets.device).manual_seed(seed)
    return model.decode(batch, settings.feedback, teacher_share(settings, 1.0), generator)


def _peak_memory(model: WordModel, name: str, case: Case, settings: Settings) -> int:
    model.zero_grad()
    return peak_memory(functools.partial(MODES[name], model, case, settings), case.inputs.device)


def _first_steps(case: Case, length: int) -> Case:
    batch = Batch(case.batch.context, case.batch.targets[:length])
    return Case(batch, case.inputs[:length], case.seed)


def _exact_gradients(model: WordModel, case: Case, progress: Progress) -> list[Tensor]:
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    columns = case.inputs.shape[1]
    for begin in range(0, columns, _EXACT_COLUMNS):
        progress.begin("exact gradients in float64")
        some = slice(begin, begin + _EXACT_COLUMNS)
        batch = Batch(case.batch.context[:, some], case.batch.targets[:, some])
        state, states = exact.encode(batch), []
        for x in exact.embedding(case.inputs[:, some]):
            state = exact.cell(x, state)
            states.append(state)
        logits = exact.head(torch.stack(states).flatten(0, 1))
        losses = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
        (losses / case.inputs.numel()).backward()
        progress.end()
    return _gradients(exact)


def _gradients(model: WordModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
