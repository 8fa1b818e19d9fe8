"""Measuring a decoder: what each way computes, the memory it takes, and then its time.

The first run of every way is not timed. It is the one whose peak memory is taken, and whose
gradient is compared with that of plain autograd on the tokens which this way fed: two ways may part
at a near tie, and both are right. Then the ways take turns as in _timing.py, but a way whose
seconds are used up takes no further turn, so a ratio is formed of the repetitions in which both
sides ran. In its turn a way runs twice, and the second run is timed: a training loop repeats one
way, and the first run after another pays for the memory that this has left behind. Gradients are
None before every run, as zero_grad leaves them.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from _decoders import (
    PLAIN,
    PRODUCTS,
    Decoder,
    Exact,
    Outcome,
    Shape,
    Way,
    exact,
    plain,
    products,
    ways,
)
from _facts import free_bytes, synchronisations
from _timing import Clock, Spread, known_spread, rotated, spread
from torch import Tensor

from accumext._peak_memory import peak_memory

IN_DOUBLE = 2 * 10**7  # logits; up to here, exact gradients are computed in float64


class Patience(NamedTuple):
    """The number of runs of one way: until its seconds are over, within bounds."""

    seconds: float
    least: int
    most: int
    longest: float  # seconds; a way that would take longer for one run is left out


class Case(NamedTuple):
    """A decoder, and what is to be found out about which ways to train it."""

    shape: Shape
    cell: str
    dtype: torch.dtype
    names: Sequence[str] | None = None  # None: all
    without: Sequence[str] = ()  # left out here, unless --shape asks
    timed: bool = True  # False: the memory alone

    def __str__(self) -> str:
        return f"{self.cell}, {str(self.dtype).removeprefix('torch.')}, {self.shape}"


class Checked(NamedTuple):
    """The results of the first run of a way."""

    peak_bytes: int  # over the parameters and their gradients
    first_seconds: float  # of this run, while its memory was recorded
    loss: float
    exact_loss: float | None = None  # None: there was nothing to compare with
    gradient_distance: float | None = None  # relative, over all parameters
    recurrent_distance: float | None = None  # of embedding and cell: the head's may outweigh them
    not_greedy: int | None = None  # tokens fed that are not the exact argmax, as after a near tie
    synchronisations: int | None = None  # waits of the host for a GPU in one run; None: on a CPU


class Result(NamedTuple):
    case: Case
    checked: dict[str, Checked]
    seconds: dict[str, list[float | None]]  # by repetition; None: took no turn
    left_out: dict[str, str]  # and why
    host_seconds: dict[str, list[float | None]]  # on a GPU, until the call had returned

    def spread(self, name: str) -> Spread:
        return spread([taken for taken in self.seconds[name] if taken is not None])

    def host_spread(self, name: str) -> Spread | None:
        return known_spread(self.host_seconds[name])

    def ratio(self, name: str, against: str) -> Spread | None:
        """Return how many times faster `name` is, over the repetitions in which both ran."""
        if name not in self.seconds or against not in self.seconds:
            return None
        pairs = zip(self.seconds[name], self.seconds[against])
        return known_spread([theirs / mine if mine and theirs else None for mine, theirs in pairs])

    def tokens_per_second(self, name: str) -> float:
        return self.case.shape.tokens / self.spread(name).median


Paces: TypeAlias = dict[tuple[str, torch.dtype], float]  # seconds per _work


class Bench:
    """Remembers how fast each way was, to leave out what would take too long."""

    def __init__(
        self,
        device: torch.device,
        seconds_of: Clock,
        patience: Patience,
        paces: Paces | None = None,  # of smaller shapes
    ) -> None:
        self._device, self._seconds_of, self._patience = device, seconds_of, patience
        self.paces: Paces = dict(paces or {})

    def measure(self, case: Case) -> Result:
        gc.collect()
        decoder = Decoder(case.shape, case.cell, self._device)
        everyone = ways(self._device, case.dtype, case.shape.batch)
        called = {
            name: way for name, way in everyone.items() if not case.names or name in case.names
        }
        left_out: dict[str, str] = {}
        runs: dict[str, Callable[[], object]] = {}
        checks: dict[str, Checked] = {}
        truth = Truth(decoder, case.shape, case.timed and not self._why_not(PLAIN, case))
        for name, way in called.items():
            if why := self._why_not(name, case):
                left_out[name] = why
                continue
            checks[name] = check(decoder, way, truth, self._device)
            taken = checks[name].first_seconds
            if case.timed and taken > self._patience.longest:
                self.paces[name, case.dtype] = taken / _work(case.shape)
                left_out[name] = f"takes {taken:.0f} s a run"
            else:
                runs[name] = functools.partial(way, decoder)
        del truth
        if case.timed:
            runs[PRODUCTS] = products(decoder, case.dtype)
        seconds, host = self._time(decoder, runs) if case.timed else ({}, {})
        for name, samples in seconds.items():
            fastest = min(taken for taken in samples if taken is not None)
            self.paces[name, case.dtype] = fastest / _work(case.shape)
        return Result(case, checks, seconds, left_out, host)

    def _why_not(self, name: str, case: Case) -> str:
        if name in case.without:
            return "runs if --shape asks for this shape"
        if name == PLAIN and not _fits(case.shape, self._device):
            return "does not fit"
        predicted = self.paces.get((name, case.dtype), 0.0) * _work(case.shape)
        if case.timed and predicted > self._patience.longest:
            return f"would take {predicted:.0f} s a run or more"
        return ""

    def _time(
        self, decoder: Decoder, runs: dict[str, Callable[[], object]]
    ) -> tuple[dict[str, list[float | None]], dict[str, list[float | None]]]:
        """Return the seconds of the device and of the host, by name and repetition."""
        patience, names = self._patience, list(runs)
        seconds: dict[str, list[float | None]] = {name: [] for name in names}
        host: dict[str, list[float | None]] = {name: [] for name in names}
        spent = dict.fromkeys(names, 0.0)
        gc.disable()
        for repetition in range(patience.most):
            due = [
                name
                for name in rotated(names, repetition)
                if repetition < patience.least or spent[name] < patience.seconds
            ]
            if not due:
                break
            for samples in (*seconds.values(), *host.values()):
                samples.append(None)
            for name in due:
                for _ in range(2):
                    decoder.forget()
                    taken = self._seconds_of(runs[name])
                seconds[name][-1], host[name][-1] = taken
                spent[name] += taken.seconds
        gc.enable()
        return seconds, host


class Truth:
    """Exact gradients on given tokens; remembers the last, since most ways feed the same tokens."""

    def __init__(self, decoder: Decoder, shape: Shape, wanted: bool = True) -> None:
        self._decoder = decoder.cast(torch.float64) if shape.logits <= IN_DOUBLE else decoder
        self._wanted = wanted
        self._last: tuple[Tensor, Exact] | None = None

    def __call__(self, inputs: Tensor) -> Exact | None:
        if not self._wanted:
            return None
        if self._last is None or not torch.equal(inputs, self._last[0]):
            self._last = None
            self._last = inputs, exact(self._decoder, inputs)
        return self._last[1]

    def learn(self, decoder: Decoder, outcome: Outcome) -> None:
        """Take over the gradients of plain autograd, which are exact in its own precision."""
        if self._wanted and self._decoder is decoder:
            found = Exact(outcome.loss, decoder.gradients(), outcome.inputs[1:])
            self._last = outcome.inputs, found


def check(decoder: Decoder, way: Way, truth: Truth, device: torch.device) -> Checked:
    """Run once, and compare."""
    outcomes: list[Outcome] = []
    taken = 0.0

    def run() -> None:
        nonlocal taken
        start = time.perf_counter()
        outcomes.append(way(decoder))
        outcomes[0].loss.item()  # waits for a GPU
        taken = time.perf_counter() - start

    waits = None
    if device.type == "cuda":
        decoder.forget()
        waits = synchronisations(lambda: way(decoder))
    decoder.forget()
    held = peak_memory(run, device)
    gradients = decoder.gradients()
    size = sum(gradient.nbytes for gradient in gradients)
    (outcome,) = outcomes
    if way is plain:
        truth.learn(decoder, outcome)
    expected = truth(outcome.inputs)
    if expected is None:
        return Checked(held - size, taken, outcome.loss.item(), synchronisations=waits)
    return Checked(
        held - size,
        taken,
        outcome.loss.item(),
        expected.loss.item(),
        distance(gradients, expected.gradients),
        distance(gradients[:-2], expected.gradients[:-2]),  # the last two are the head's
        int((outcome.inputs[1:] != expected.greedy[: len(outcome.inputs) - 1]).sum()),
        waits,
    )


def distance(gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return |gradients - expected| / |expected|, over all of them together."""

    def norm(tensors: Sequence[Tensor]) -> float:
        parts = (torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors)
        return math.hypot(*(part.item() for part in parts))

    differences = [g.to(e.dtype) - e for g, e in zip(gradients, expected, strict=True)]
    return norm(differences) / norm(expected)


def _work(shape: Shape) -> int:
    """Return a bound of every way's work: with few rows, reading the weights takes the time."""
    return shape.steps * shape.vocabulary * shape.size


def _fits(shape: Shape, device: torch.device) -> bool:
    """Tell whether plain autograd's probabilities, always float32, leave room for the rest."""
    return 4 * shape.logits < 0.6 * free_bytes(device)
