"""Paired timing: in every repetition each contender runs once, in rotated order.

Ratios are formed within a repetition, where both sides saw the same state of the machine, and their
median is taken; the memory's limit is measured in every repetition, too. A contender's preparation,
such as gradients as they were, is not timed. A GPU's time is that of the device alone, beside which
stands the host's.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

FLUSH_BYTES = 256 * 2**20  # more than the last-level cache of any GPU

# Relative distance between what two contenders computed. float32: a sum over a tensor of a million
# elements may be off by as much. Half precision: the norm of every tensor is rounded to that.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Taken(NamedTuple):
    """The times of a call."""

    seconds: float  # of the device
    # Until the call had returned, if that is not the same; None also if a GPU had nothing
    # left to sleep before: its seconds then include some of the host's.
    host_seconds: float | None = None


Clock = Callable[[Callable[[], Any]], Taken]


class Shape(NamedTuple):
    """Of a model: so many elements in so many tensors of equal size."""

    elements: int
    tensors: int
    role: str = ""  # by which the figures know it

    def sizes(self) -> list[int]:
        cuts = [self.elements * i // self.tensors for i in range(self.tensors + 1)]
        return [stop - start for start, stop in itertools.pairwise(cuts)]

    def __str__(self) -> str:
        return f"{count(self.elements)} in {self.tensors:,}"


class Traffic(NamedTuple):
    """Bytes per element that have to be moved."""

    read: int  # in passes that only read
    update: int  # in passes that write too: reads and writes added up
    copy_read: int = 0  # in passes that read one memory and write another of another size
    copy_written: int = 0

    def __str__(self) -> str:
        copied = f"c{self.copy_read}>{self.copy_written}" if self.copy_read else ""
        parts = [f"{letter}{size}" for letter, size in zip("ru", self) if size]
        return " + ".join([*parts, *filter(None, [copied])])


UNKNOWN = Traffic(0, 0)  # what a forward pass moves nobody counts


class Contender(NamedTuple):
    """One way to do a job."""

    run: Callable[[], Any]
    traffic: Traffic
    outcome: Callable[[Any], Sequence[Tensor]] | None  # from what run returned; None: does less
    memory: Callable[[], float] | None = None  # that a run takes, in the unit of its report


class Job(NamedTuple):
    """Something to be done in several ways; the first is what the others are compared with."""

    name: str
    shape: Shape
    contenders: dict[str, Contender]
    prepare: Callable[[], Any] = lambda: None  # before every run
    again: bool = False  # only the second of two runs in a row is timed


class Limits(NamedTuple):
    """Bytes per second that the memory moves at best."""

    read: float
    update: float  # reads and writes added up
    copy: float  # torch.copy_, the same
    write: float | None = None  # if it is known

    def seconds(self, traffic: Traffic, elements: int) -> float:
        """Return the least time to move this much per element.

        Reads and writes have ways of their own between a core and the memory. An update, which
        reads as much as it writes, keeps both of them busy, a copy of another size only one.
        """
        copied = traffic.copy_read, traffic.copy_written
        written = 0.0 if self.write is None else copied[1] / self.write
        copy = max(copied[0] / self.read, written, sum(copied) / self.update)
        return elements * (traffic.read / self.read + traffic.update / self.update + copy)


class Yardstick(NamedTuple):
    """The fastest plain read, update and write of float32 elements, and torch.copy_."""

    reader: str
    read: Callable[[], Any]
    updater: str
    update: Callable[[], Any]
    copy: Callable[[], Any]
    elements: int
    writer: str = ""
    write: Callable[[], Any] | None = None

    def limits(self, seconds_of: Clock) -> Limits:
        """Return the present speed of the memory."""
        read, update = (seconds_of(run).seconds for run in (self.read, self.update))
        copy = update if self.copy is self.update else seconds_of(self.copy).seconds
        rates = 4 * self.elements / read, 8 * self.elements / update, 8 * self.elements / copy
        if self.write is None:
            return Limits(*rates)
        return Limits(*rates, 4 * self.elements / seconds_of(self.write).seconds)


class Spread(NamedTuple):
    q1: float
    median: float
    q3: float


class Patience(NamedTuple):
    """The number of repetitions: until the seconds are over, within bounds."""

    seconds: float = 1.0
    least: int = 9
    most: int = 100


class Result(NamedTuple):
    """The seconds that each contender took, in order of the repetitions."""

    job: str
    shape: Shape
    traffic: dict[str, Traffic]
    seconds: dict[str, list[float]]
    limits: list[Limits]  # of each repetition; none if the data may lie in a cache
    host_seconds: dict[str, list[float | None]]
    memory: Mapping[str, float] = {}  # at the highest point of a run, if counted

    @property
    def baseline(self) -> str:
        return next(iter(self.seconds))

    def spread(self, name: str) -> Spread:
        return spread(self.seconds[name])

    def rate(self, name: str) -> float:
        """Return the bytes per second."""
        return self.shape.elements * sum(self.traffic[name]) / self.spread(name).median

    def ratio(self, name: str, against: str) -> Spread:
        """Return how many times faster `name` is, repetition by repetition."""
        pairs = zip(self.seconds[name], self.seconds[against])
        return spread([theirs / mine for mine, theirs in pairs])

    def share(self, name: str) -> Spread | None:
        """Return the least time for what has to move, over that taken, repetition by repetition."""
        pairs = zip(self._least(name), self.seconds[name])
        return spread([least / taken for least, taken in pairs]) if self.limits else None

    def share_of_copy(self, name: str) -> Spread | None:
        """Return the bytes per second, over those of torch.copy_, repetition by repetition."""
        size = self.shape.elements * sum(self.traffic[name])
        pairs = zip(self.limits, self.seconds[name])
        return (
            spread([size / taken / limit.copy for limit, taken in pairs]) if self.limits else None
        )

    def host_spread(self, name: str) -> Spread | None:
        return known_spread(self.host_seconds[name])

    def allowed(self, name: str, against: str) -> float | None:
        """Return the ratio if both were at the limit."""
        pairs = zip(self._least(name), self._least(against))
        return spread([theirs / mine for mine, theirs in pairs]).median if self.limits else None

    def _least(self, name: str) -> list[float]:
        return [limit.seconds(self.traffic[name], self.shape.elements) for limit in self.limits]


def count(number: int) -> str:
    """Return a round number as people say it."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return str(number)


def spread(values: Sequence[float]) -> Spread:
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def known_spread(values: Sequence[float | None]) -> Spread | None:
    """Return the spread of those that are known; None if that is only one."""
    known = [value for value in values if value is not None]
    return spread(known) if len(known) > 1 else None


def rounded(values: Spread) -> list[float]:
    """Return quartiles and median as results have them, with more digits than any table."""
    return [float(f"{value:.7g}") for value in values]


def clock(device: torch.device, ahead: bool = True) -> Clock:
    """Return a clock of one call; on a GPU with nothing left in its cache.

    `ahead`: the GPU begins when all of the call is in its queue. Of a call that puts thousands of
    kernels there, more than the queue holds, the time from the first to the last is that of both.

    Caches of the CPU stay as they are: what fits into them is there after a backward pass, too.
    """
    return _wall_seconds if device.type == "cpu" else DeviceClock(device, ahead)


class DeviceClock:
    """Times calls on a GPU with events."""

    _FIRST, _LONGEST = 2e-3, 20e-3  # s, to sleep before a call

    def __init__(self, device: torch.device, ahead: bool) -> None:
        self._ahead = ahead
        self._buffer = torch.ones(FLUSH_BYTES // 4, device=device)
        self._sum = torch.zeros((), device=device)
        self._sleeps: WeakKeyDictionary[Callable[[], Any], float] = WeakKeyDictionary()
        for cycles in (10**6, 10**8):  # the first wakes the GPU up
            slept = self._time(functools.partial(torch.cuda._sleep, cycles))
            self._cycles_per_second = cycles / slept.seconds

    def __call__(self, run: Callable[[], Any]) -> Taken:
        # Reading leaves no line that would have to be written back while the call runs.
        torch.sum(self._buffer, 0, out=self._sum)
        if not self._ahead:
            torch.cuda.synchronize()
            return self._time(run)
        sleep = self._sleeps.get(run, self._FIRST)
        torch.cuda._sleep(int(sleep * self._cycles_per_second))
        taken = self._time(run)
        # Where the host waits for the GPU, no sleep is long enough.
        needed = 2 * (taken.host_seconds or sleep)
        self._sleeps[run] = min(self._LONGEST, max(self._FIRST, needed))
        return taken

    def _time(self, run: Callable[[], Any]) -> Taken:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.perf_counter()
        run()
        host: float | None = time.perf_counter() - begin
        stop.record()
        if self._ahead and start.query():
            host = None
        stop.synchronize()
        return Taken(start.elapsed_time(stop) / 1e3, host)


def _wall_seconds(run: Callable[[], Any]) -> Taken:
    start = time.perf_counter_ns()
    run()
    return Taken((time.perf_counter_ns() - start) / 1e9)


def measure(
    job: Job, seconds_of: Clock, patience: Patience, yardstick: Yardstick | None = None
) -> Result:
    """Check that the contenders do the same, which also warms them up, then time them."""
    gc.collect()
    check(job)
    memory = {name: by.memory() for name, by in job.contenders.items() if by.memory is not None}
    names = list(job.contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    host: dict[str, list[float | None]] = {name: [] for name in names}
    limits: list[Limits] = []
    end = time.monotonic() + patience.seconds
    gc.disable()
    for repetition in range(patience.most):
        if repetition >= patience.least and time.monotonic() > end:
            break
        if yardstick is not None:
            limits.append(yardstick.limits(seconds_of))
        for name in rotated(names, repetition):
            for _ in range(1 + job.again):
                job.prepare()
                taken = seconds_of(job.contenders[name].run)
            seconds[name].append(taken.seconds)
            host[name].append(taken.host_seconds)
    gc.enable()
    traffic = {name: contender.traffic for name, contender in job.contenders.items()}
    return Result(job.name, job.shape, traffic, seconds, limits, host, memory)


def rotated(names: list[str], repetition: int) -> list[str]:
    """Return contenders in the order of their turns: in each repetition another one begins."""
    first = repetition % len(names)
    return names[first:] + names[:first]


def check(job: Job) -> None:
    """Run every contender once; AssertionError if what they computed differs."""
    expected: list[Tensor] = []
    for name, contender in job.contenders.items():
        job.prepare()
        returned = contender.run()
        if contender.outcome is None:
            continue
        got = contender.outcome(returned)
        expected = expected or [tensor.clone() for tensor in got]
        assert len(got) == len(expected), f"{job.name}: {name} left {len(got)} tensors"
        for mine, theirs in zip(got, expected):
            error = distance(mine, theirs)
            assert error <= TOLERANCES[theirs.dtype], f"{job.name}: {name} is off by {error:.1e}"


def distance(tensor: Tensor, expected: Tensor) -> float:
    """Return |tensor - expected| / |expected|, 0 if both are zero."""
    norm = torch.linalg.vector_norm
    expected = expected.double()
    difference = norm(tensor.double() - expected)
    return 0.0 if difference == 0 else (difference / norm(expected)).item()
