"""Other processes that have a part in a window: none, those of a group, or those of shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from accumext.distributed import Agreement, Alike, AllReduceInBuckets, ShardedWindow, agree
from accumext.optimizer._grads import clear, grads_of, put
from accumext.optimizer._ledger import Ledger
from accumext.optimizer._settings import Settings
from accumext.optimizer._sums import adding
from accumext.optimizer._window import NO_WINDOW, EngineLike, Phase, Window, explain
from accumext.tensors import checks
from accumext.tensors.checks import message
from accumext.tensors.kinds import Group
from accumext.tensors.scalars import Scalar


class Sending(NamedTuple):
    """A window on its way into the sum of all processes, which have agreed on it."""

    buckets: AllReduceInBuckets
    agreed: Agreement

    def abandon(self) -> None:
        """Let the sum arrive on the other processes, not finite, so that they skip the window."""
        self.buckets.abandon()


class Reducer(ABC):
    """Makes the window of this process that of all. What most have no need of does nothing."""

    shared = True  # whether other processes have a part in windows
    group: Group | None = None  # over which gradients are summed
    base_weight: Scalar | None = None  # of all processes: losses are multiplied by their weights
    checked: tuple[Settings, Tensor] | None = None  # settings that all have, and their numbers

    def begin(self, op: str, engine: EngineLike) -> None:
        """Get ready for gradients; raise for those that are not what a window is summed of."""
        return

    @abstractmethod
    def close(self, op: str, engine: EngineLike, flushing: bool) -> bool:
        """Make the open window that of all processes; False if there is nothing in it."""

    def closed(self) -> None:
        """All processes have closed a window together."""
        return

    def send(self, op: str, engine: EngineLike, window: Window, weight: Scalar) -> Sending | None:
        """Begin to send a window whose last backward pass is about to run, if it is the last."""
        return None

    def collect(self, op: str, engine: EngineLike) -> None:
        """Add to the window what is held elsewhere."""
        return

    def drop(self) -> None:
        """Forget what is held elsewhere. May be called again after an exception."""
        return

    def refuse_while_held(self, op: str) -> None:
        """Raise for what needs the gradients of the window while they are held elsewhere."""
        return

    def holding(
        self, op: str, engine: EngineLike, model: nn.Module | None
    ) -> AbstractContextManager[None]:
        """Return the context of a micro-batch of this model."""
        return nullcontext()

    @abstractmethod
    def knowing(self, parameters: Sequence[Tensor]) -> Reducer:
        """Return the one for parameters of which some were added."""


def reducer_of(
    group: Group | None, parameters: Sequence[Tensor], before: Reducer | None = None
) -> Reducer:
    """Choose for a group to sum over, if any, and for these parameters.

    Args:
        before: the one so far, whose shards go on.
    """
    inner = before.inner if isinstance(before, AllReduce) else before
    if not isinstance(inner, Shards):
        window = ShardedWindow.of(parameters)
        inner = Alone() if window is None else Shards(window)
    return inner if group is None or group.size() == 1 else AllReduce(group, inner)


class Alone(Reducer):
    """No other process."""

    shared = False

    def close(self, op: str, engine: EngineLike, flushing: bool) -> bool:
        window = engine.state.window
        if window.unreduced:
            contract = "be known for gradients that micro_batch(model) has held back"
            advice = "Run a micro_batch(model) first, or pass process_group to the constructor"
            got = "a window that was loaded"
            raise RuntimeError(message(op, "the group", contract, got, advice))
        return window.ledger.micro_batches > 0

    def knowing(self, parameters: Sequence[Tensor]) -> Reducer:
        return reducer_of(None, parameters)


class Shards(Reducer):
    """The processes that `fully_shard` splits parameters over, which average gradients itself."""

    def __init__(self, window: ShardedWindow) -> None:
        self._window = window
        self._agreed = False  # the window's weight is the mean over all shards

    @property
    def base_weight(self) -> Scalar:  # type: ignore[override]
        return self._window.unit

    def begin(self, op: str, engine: EngineLike) -> None:
        """Compare processes before the first micro-batch: if windows are not of one size, one would
        wait for the others to close it while those wait for it in FSDP."""
        if engine.settings.synchronize == "window" and not self._window.is_open:
            self._window.refuse_synchronised(op)
        if engine.reducer.checked is None:
            window = engine.state.window
            agree_on(op, engine, window, window.ledger, engine.reducer.group, flushing=False)
        self._window.idle, self._agreed = False, False

    def close(self, op: str, engine: EngineLike, flushing: bool) -> bool:
        """Take the mean of the weights, as FSDP does of the gradients."""
        window = engine.state.window
        if self._agreed:
            return True
        if window.ledger.micro_batches == 0 and (self._window.idle or not flushing):
            return False
        agreed = agree_on(op, engine, window, window.ledger, None, flushing)
        if not agreed.any_open:
            self._window.idle = True
            return False
        self.collect(op, engine)
        window = engine.state.window
        ledger = window.ledger._replace(weight=agreed.weight, found_inf=agreed.found_inf)
        engine.update(window=window._replace(ledger=ledger))
        self.note(agreed)
        return True

    def note(self, agreed: Agreement) -> None:
        """Choose the next base of weights."""
        self._agreed = True
        self._window.note_weight(agreed.weight / agreed.counted)

    def closed(self) -> None:
        self._window.idle = True
        self._agreed = False

    def collect(self, op: str, engine: EngineLike) -> None:
        """Have FSDP reduce what it holds. An exception meanwhile drops the window, and says so."""
        sharded, parameters = self._window, engine.target.parameters()
        sharded.refuse_to_collect(op)
        if not sharded.holds:
            sharded.collect()
            return
        before = grads_of(parameters)
        try:
            sharded.collect()
            with torch.no_grad():
                window = engine.state.window.of(parameters)
                window = adding(window, grads_of(parameters), 1.0).run([])
            clear(parameters)
            engine.update(window=window._replace(norm=None))
        except BaseException as error:
            engine.drop()
            put(parameters, before)
            explain(error, f"{op}: the open window was dropped: it was being reduced")
            raise

    def drop(self) -> None:
        self._agreed = False
        self._window.drop()

    def refuse_while_held(self, op: str) -> None:
        self._window.refuse_while_held(op)

    @contextmanager
    def holding(self, op: str, engine: EngineLike, model: nn.Module | None) -> Iterator[None]:
        """With synchronize="window", let the modules keep their gradients to themselves.

        An exception drops the window, of which FSDP holds all gradients in one sum.
        """
        settings = engine.settings
        if settings.synchronize == "backward" or model is None:
            yield
            return
        roots = self._window.roots_to_hold(op, model, settings.reduction)
        before = engine.state.micro_batches
        try:
            with self._window.holding(roots, model, last=before + 1 >= settings.window):
                yield
            if engine.state.micro_batches == before:
                contract = "have an opt.backward where synchronize='window'"
                raise RuntimeError(message(op, "the micro-batch", contract, "none"))
        except BaseException as error:
            engine.drop()
            if before:
                explain(error, f"{op}: the open window was dropped: FSDP holds it in one sum")
            raise

    def knowing(self, parameters: Sequence[Tensor]) -> Reducer:
        self.checked = None
        return self


class AllReduce(Reducer):
    """The processes of a group, over which the sums are added once per window."""

    def __init__(self, group: Group, inner: Alone | Shards) -> None:
        self.group, self.inner = group, inner

    @property
    def base_weight(self) -> Scalar | None:  # type: ignore[override]
        return self.inner.base_weight

    def begin(self, op: str, engine: EngineLike) -> None:
        self.inner.begin(op, engine)

    def send(self, op: str, engine: EngineLike, window: Window, weight: Scalar) -> Sending | None:
        """Begin, once all processes are told the numbers of the window."""
        ledger = window.ledger
        count = ledger.micro_batches + 1
        if count < engine.settings.window:
            return None
        ledger = ledger._replace(weight=ledger.weight + weight, micro_batches=count)
        return self._begun(op, engine, window, ledger, flushing=False)

    def _begun(
        self, op: str, engine: EngineLike, window: Window, ledger: Ledger, flushing: bool
    ) -> Sending:
        parameters = engine.target.parameters()
        buckets = AllReduceInBuckets(parameters, _trained(parameters, window), self.group)  # type: ignore[arg-type]
        return Sending(buckets, agree_on(op, engine, window, ledger, self.group, flushing))

    def close(self, op: str, engine: EngineLike, flushing: bool) -> bool:
        """Send the rest of the window, and wait for the sum of all processes."""
        if engine.state.window.phase is Phase.SUMMED:  # an earlier step ended in an error then
            return True
        sending, parameters = engine.state.sending, engine.target.parameters()
        window = engine.state.window
        if sending is None:
            window = engine.window_out_of_grad()
            window = window._replace(ledger=engine.policy.counting(window.ledger))
            sending = self._begun(op, engine, window, window.ledger, flushing)
            if not sending.agreed.any_open:
                return False
            if isinstance(self.inner, Shards):
                self.inner.note(sending.agreed)
                self.inner.collect(op, engine)
                window = engine.state.window
        sums = list(window.of(parameters).sums)
        window = window._replace(parameters=(), sums=())  # a bucket frees what it has copied
        if engine.state.in_grad:
            clear(parameters)
        engine.update(window=NO_WINDOW, sending=None)
        try:
            sending.buckets.finish(sums, window.ledger.quotient("sum").value())
            sums = engine.target.send(sums)()
            engine.update(window=_summed(window, parameters, sums, sending.agreed))
        except BaseException as error:
            explain(error, f"{op}: {_WAS_SUMMED}")
            raise
        return True

    def closed(self) -> None:
        self.inner.closed()

    def collect(self, op: str, engine: EngineLike) -> None:
        self.inner.collect(op, engine)

    def drop(self) -> None:
        self.inner.drop()

    def refuse_while_held(self, op: str) -> None:
        self.inner.refuse_while_held(op)

    def holding(
        self, op: str, engine: EngineLike, model: nn.Module | None
    ) -> AbstractContextManager[None]:
        return self.inner.holding(op, engine, model)

    def knowing(self, parameters: Sequence[Tensor]) -> Reducer:
        return reducer_of(self.group, parameters, self.inner)


_WAS_SUMMED = "the open window was dropped: it was being summed over all processes"


def _summed(
    window: Window, parameters: Sequence[Tensor], sums: Sequence[Tensor | None], agreed: Agreement
) -> Window:
    ledger = window.ledger._replace(
        weight=agreed.weight,
        base_weight=1.0,
        base_scale=1.0,
        found_inf=agreed.found_inf,
        counted=None if window.ledger.counted is None else agreed.counted,
        of_all=agreed.counted,
    )
    return window._replace(
        parameters=parameters, sums=sums, norm=None, ledger=ledger, phase=Phase.SUMMED
    )


# What processes have to have alike

_SAME_COUNT = (
    "Give every process the same number, where a micro-batch with weight=0 counts for nothing, and "
    "call step and flush on all of them"
)
_DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64
]  # fmt: skip


def _dtypes(bits: float) -> str:
    there = [checks.dtype_name(dtype) for i, dtype in enumerate(_DTYPES) if int(bits) >> i & 1]
    return " and ".join(there)


def _choice(name: str, choices: Sequence[str]) -> Alike:
    return Alike(name, "be the same", lambda index: repr(choices[int(index)]))


_ALIKE = (
    Alike(
        "the window",
        "hold the same number of micro-batches",
        lambda n: f"{n:.0f}" if n >= 0 else f"full with {-n:.0f}",
        advice=_SAME_COUNT,
    ),
    Alike("the window", "be of the same trainable parameters", unit=" elements"),
    # The numbers of `_terms`
    Alike("max_norm", "be the same", lambda n: "None" if n < 0 else str(n)),
    Alike("norm_type", "be the same", str),
    _choice("reduction", checks.REDUCTIONS),
    _choice("on_nonfinite", checks.ON_NONFINITE),
    _choice("synchronize", checks.SYNCHRONIZE),
    Alike("masters", "be of as many parameters"),
    Alike("parameters", "have the same dtypes", _dtypes),
    Alike(
        "parameters",
        "have the same shapes and dtypes in the same order",
        lambda n: f"{int(n):08x}",
        " (checksums)",
    ),
)


def _terms(engine: EngineLike) -> Tensor:
    """Return, as numbers, all that processes have to have alike beside a window."""
    settings, parameters = engine.settings, engine.target.parameters()
    kinds = [(list(p.shape), p.dtype) for p in parameters]
    numbers = (
        -1.0 if settings.max_norm is None else settings.max_norm,
        settings.norm_type,
        checks.REDUCTIONS.index(settings.reduction),
        checks.ON_NONFINITE.index(settings.on_nonfinite),
        checks.SYNCHRONIZE.index(settings.synchronize),
        len(engine.target.links),
        sum(1 << i for i, dtype in enumerate(_DTYPES) if any(p.dtype == dtype for p in parameters)),
        crc32(repr(kinds).encode()),
    )
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def agree_on(
    op: str,
    engine: EngineLike,
    window: Window,
    ledger: Ledger,
    group: Group | None,
    flushing: bool,
) -> Agreement:
    """Sum the numbers of a window over the processes, and raise if these do not close the same one,
    or were not told the same.

    If only a device knows the sums, a flush alone waits for it, and the first window after settings
    were made or assigned.
    """
    parameters, settings, reducer = engine.target.parameters(), engine.settings, engine.reducer
    known, terms = reducer.checked or (None, None)
    if known != settings or terms is None:
        terms = _terms(engine)
    counted = ledger.micro_batches if ledger.counted is None else ledger.counted
    elements = sum(parameters[i].numel() for i in _trained(parameters, window))
    agreed = agree(
        op,
        parameters,
        group,
        (ledger.weight, counted, ledger.found_inf),
        _ALIKE,
        # A full window tells its size.
        (ledger.micro_batches if flushing else -settings.window, elements),
        terms,
        looks=flushing or known != settings,
        advice=_SAME_COUNT,
    )
    reducer.checked = settings, terms
    return agreed


def _trained(parameters: Sequence[Tensor], window: Window) -> list[int]:
    """Return the indices of the parameters that are trained or have a gradient."""
    sums: Sequence[Any] = window.of(parameters).sums or [None] * len(parameters)
    rows = enumerate(zip(parameters, sums, strict=True))
    return [i for i, (p, m) in rows if p.requires_grad or m is not None or p.grad is not None]
