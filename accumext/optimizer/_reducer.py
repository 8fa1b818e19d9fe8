"""The processes that share a window: replicas of a model, or holders of its shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from accumext.distributed import Agreement, Alike, AllReduceInBuckets, ShardedWindow, agree
from accumext.optimizer._engine import Engine, Reducer, explain
from accumext.optimizer._grads import clear_grads, grads_of, set_grads
from accumext.optimizer._ledger import Ledger
from accumext.optimizer._sums import adding
from accumext.optimizer._window import NO_WINDOW, Phase, Window
from accumext.tensors import checks
from accumext.tensors.checks import message
from accumext.tensors.scalars import Scalar, equals, on_device


class Sending(NamedTuple):
    """A window that is being summed over all processes, after they have compared its numbers."""

    buckets: AllReduceInBuckets
    agreed: Agreement


def reducer_of(parameters: Sequence[Tensor], before: Reducer | None = None) -> Reducer:
    """Return the reducer for these parameters: `before`, if there is one that fits them."""
    window = ShardedWindow.of(parameters)
    if window is None or isinstance(before, Shards):
        return before or Replicas()
    return Shards(window)


def know_parameters(engine: Engine) -> None:
    """Look at the optimizer's parameters again, after some were added."""
    engine.tensors.know()
    parameters = engine.tensors.parameters()
    engine.main_grads.declare(parameters)
    before, engine.reducer = engine.reducer, reducer_of(parameters, engine.reducer)
    engine.reducer.group, engine.reducer.checked = before.group, None


class Replicas(Reducer):
    """Processes that each hold all parameters; without a group, this process alone."""

    @property
    def shared(self) -> bool:
        return self.group is not None

    def close(self, op: str, engine: Engine, flushing: bool) -> bool:
        if self.group is not None:
            return _sum_over_group(self, op, engine, flushing)
        window = engine.state.window
        if window.unreduced:
            contract = "be known for gradients that micro_batch(model) has held back"
            advice = "Run a micro_batch(model) first, or pass process_group to the constructor"
            got = "a window that was loaded"
            raise RuntimeError(message(op, "the group", contract, got, advice))
        return window.ledger.micro_batches > 0


class Shards(Reducer):
    """Processes that `fully_shard` splits parameters over. FSDP averages gradients over them. If
    there is also a process group, the window is summed over it as by `Replicas`."""

    shared = sharded = True

    def __init__(self, window: ShardedWindow) -> None:
        self._window, self.base_weight = window, window.unit
        self._averaged = False  # the window's weight is the mean over all shards

    def begin(self, op: str, engine: Engine) -> None:
        """Compare settings before the first micro-batch. If windows differed in size, one process
        would wait for the others in `step` while those wait for it in FSDP."""
        if engine.settings.synchronize == "window" and not self._window.is_open:
            self._window.refuse_synchronised(op)
        if self.checked is None:
            window = engine.state.window
            _agree_on(self, op, engine, window, window.ledger, flushing=False)
        self._window.idle = self._averaged = False

    def close(self, op: str, engine: Engine, flushing: bool) -> bool:
        if self.group is not None:
            return _sum_over_group(self, op, engine, flushing)
        if self._averaged:
            return True
        if engine.state.micro_batches == 0 and (self._window.idle or not flushing):
            return False
        window = engine.state.window
        agreed = _agree_on(self, op, engine, window, window.ledger, flushing)
        if not agreed.any_open:
            self._window.idle = True
            return False
        self.collect(op, engine)
        window = engine.state.window
        found_inf = _found_inf(engine, window.ledger, agreed)
        ledger = window.ledger._replace(weight=agreed.weight, found_inf=found_inf)
        engine.update(window=window._replace(ledger=ledger))
        self._averaged = True
        self.agreed(agreed)
        return True

    def agreed(self, agreed: Agreement) -> None:
        self._window.note_weight(agreed.weight / agreed.counted)
        self.base_weight = self._window.unit

    def closed(self) -> None:
        self._window.idle, self._averaged = True, False

    def collect(self, op: str, engine: Engine) -> None:
        """Have FSDP reduce the gradients that it holds. An exception in it drops the window."""
        sharded, parameters = self._window, engine.tensors.parameters()
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
            clear_grads(parameters)
            engine.update(window=window._replace(norm=None))
        except BaseException as error:
            engine.drop()
            set_grads(parameters, before)
            explain(error, op, "it was being reduced")
            raise

    def drop(self) -> None:
        self._averaged = False
        self._window.drop()

    def refuse_while_held(self, op: str) -> None:
        self._window.refuse_while_held(op)

    def holding(
        self, op: str, engine: Engine, model: nn.Module | None
    ) -> AbstractContextManager[None]:
        if engine.settings.synchronize == "backward" or model is None:
            return nullcontext()
        return self._holding(op, engine, model)

    @contextmanager
    def _holding(self, op: str, engine: Engine, model: nn.Module) -> Iterator[None]:
        """Have the modules keep gradients unreduced. An exception drops the whole window, because
        FSDP holds its gradients in one sum."""
        roots = self._window.roots_to_hold(op, model, engine.settings.reduction)
        before = engine.state.micro_batches
        try:
            last = before + 1 >= engine.settings.window
            with self._window.holding(roots, model, last):
                yield
            if engine.state.micro_batches == before:
                contract = "have an opt.backward if synchronize='window'"
                raise RuntimeError(message(op, "the micro-batch", contract, "none"))
        except BaseException as error:
            engine.drop()
            if before:
                explain(error, op, "FSDP holds it in one sum")
            raise


# Sums over a group


def send_in_backward(op: str, engine: Engine, window: Window, weight: Scalar) -> Sending | None:
    """Begin to send a window whose last backward pass is about to run, after processes have
    compared its numbers. Return None if the pass is not the last of the window."""
    ledger, reducer = window.ledger, engine.reducer
    count = ledger.micro_batches + 1
    if reducer.group is None or count < engine.settings.window:
        return None
    ledger = ledger._replace(weight=ledger.weight + weight, micro_batches=count)
    return _send(reducer, op, engine, window, ledger, flushing=False)


def _send(
    reducer: Reducer, op: str, engine: Engine, window: Window, ledger: Ledger, flushing: bool
) -> Sending:
    parameters, group = engine.tensors.parameters(), reducer.group
    assert group is not None
    buckets = AllReduceInBuckets(parameters, _trained(parameters, window), group)
    return Sending(buckets, _agree_on(reducer, op, engine, window, ledger, flushing))


def _sum_over_group(reducer: Reducer, op: str, engine: Engine, flushing: bool) -> bool:
    """Send the sums that have not been sent yet, and wait for the sums over all processes. Return
    False if no process has anything in its window."""
    state, parameters = engine.state, engine.tensors.parameters()
    window, sending, in_grad = state.window, state.sending, state.in_grad
    del state  # so that a bucket frees each sum once it has copied it
    if window.phase is Phase.SUMMED:  # an earlier step failed after the sum
        return True
    if sending is None:
        window = engine.window_out_of_grad()
        if engine.policy.leaves_out and window.ledger.counted is None:
            count = float(window.ledger.micro_batches)
            window = window._replace(ledger=window.ledger._replace(counted=count))
        sending = _send(reducer, op, engine, window, window.ledger, flushing)
        if not sending.agreed.any_open:
            return False
        if reducer.sharded:
            reducer.agreed(sending.agreed)
            reducer.collect(op, engine)
            window = engine.state.window
    agreed, sums = sending.agreed, list(window.of(parameters).sums)
    ledger, window = window.ledger, window._replace(parameters=(), sums=())
    if in_grad:
        clear_grads(parameters)
    engine.update(window=NO_WINDOW, sending=None)
    try:
        sending.buckets.finish(sums, ledger.quotient("sum").value())
        ledger = ledger._replace(
            weight=agreed.weight,
            base_weight=1.0,
            base_scale=1.0,
            found_inf=_found_inf(engine, ledger, agreed),
            counted=None if ledger.counted is None else agreed.counted,
            of_all=agreed.counted,
        )
        sums = engine.tensors.send(sums)()
        window = window._replace(
            parameters=parameters, sums=sums, ledger=ledger, phase=Phase.SUMMED, norm=None
        )
        engine.update(window=window)
    except BaseException as error:
        explain(error, op, "it was being summed over all processes")
        raise
    return True


def _found_inf(engine: Engine, ledger: Ledger, agreed: Agreement) -> Scalar:
    """Return the flag of all processes, unless nobody looks: that of a device may not be read."""
    nobody = not engine.policy.looks and equals(ledger.found_inf, 0.0)
    return 0.0 if nobody and on_device(agreed.found_inf) else agreed.found_inf


# Numbers and settings that must be equal on all processes

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
    # The numbers of `_terms`, in order
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


def _terms(engine: Engine) -> Tensor:
    """Return, as numbers, the settings and parameters that must be equal on all processes."""
    settings, parameters = engine.settings, engine.tensors.parameters()
    kinds = [(list(p.shape), p.dtype) for p in parameters]
    numbers = (
        -1.0 if settings.max_norm is None else settings.max_norm,
        settings.norm_type,
        checks.REDUCTIONS.index(settings.reduction),
        checks.ON_NONFINITE.index(settings.on_nonfinite),
        checks.SYNCHRONIZE.index(settings.synchronize),
        len(engine.tensors.links),
        sum(1 << i for i, dtype in enumerate(_DTYPES) if any(p.dtype == dtype for p in parameters)),
        crc32(repr(kinds).encode()),
    )
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _agree_on(
    reducer: Reducer, op: str, engine: Engine, window: Window, ledger: Ledger, flushing: bool
) -> Agreement:
    """Sum the numbers of a window over the processes, and raise if the processes do not close the
    same window, or their settings differ.

    If the sums are on a device, only a flush, and the first window after a change of settings, wait
    for it.
    """
    parameters, settings = engine.tensors.parameters(), engine.settings
    known, terms = reducer.checked or (None, None)
    if known != settings or terms is None:
        terms = _terms(engine)
    counted = ledger.micro_batches if ledger.counted is None else ledger.counted
    elements = sum(parameters[i].numel() for i in _trained(parameters, window))
    agreed = agree(
        op,
        parameters,
        reducer.group,
        (ledger.weight, counted, ledger.found_inf),
        _ALIKE,
        # A full window sends its size as a negative number, to tell it from a flush.
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
