"""Steps under autograd whose graph keeps no tensors: the backward pass runs them again.

The graph is the one that the steps build in the forward pass. So gradients reach all tensors that
the steps use, hooks run once, and DistributedDataParallel communicates once per backward pass. Only
saved tensors are missing: the graph has a number for each, by which the tensor is found among those
that the steps save when they run again.

A part is what one call of `record` runs. Its life:

    forward    record -> pack        for each tensor: notes shape and writes, returns its number
    backward   unpack -> _replay     once per part, at the first number that is asked for
               run_again             the steps, with generators and hidden state of the checkpoint
               check_same            results as in the forward pass, else an error

Tensors of one part exist at a time, and each is handed out once: another backward pass replays.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from accumext.recurrence._generators import replay_rng, rng_state, set_rng_state
from accumext.recurrence._kept_state import KeptState, Snapshot
from accumext.recurrence._states import State, detach, map_tensors, tensors, write_counts
from accumext.tensors.checks import message
from accumext.tensors.torch_private import (
    assert_on_device,
    base_of,
    function_modes,
    not_traced,
    storage_key,
    under_function_modes,
    write_count,
)

Result = TypeVar("Result")


class Checkpoint(NamedTuple):
    """Everything that steps need to run again from one step on."""

    state: State  # detached
    read: list[Tensor]  # tensors that the steps read: those of the state and others
    writes: list[int]  # number of writes into each of them so far
    rng: tuple[Tensor, ...] | None  # None: nothing is drawn
    kept: Snapshot  # hidden state of the step function


class Replay:
    """Steps of one call that run again: for the backward pass, or from an earlier step on."""

    def __init__(self, kept: KeptState, device: torch.device, draws: bool = True) -> None:
        self.kept, self.device, self.draws = kept, device, draws
        self.modes = _modes_now(device)  # a context with the modes of the forward pass
        # The tensors of the part that was run again last, and the key of that part. The part
        # refers to this object: a reference to it would be a cycle, and outlive the graph.
        self._tensors: dict[int, Tensor] = {}
        self._tensors_of: object = None
        self._lock = threading.RLock()  # a backward pass has one thread per device
        # The last `moment` noted, a number that callers choose, and fingerprints of its results.
        self._noted: tuple[int, list[Tensor]] | None = None

    def checkpoint(
        self, state: State, read: Sequence[Tensor] = (), graphs: bool = False
    ) -> Checkpoint:
        """Return a checkpoint before the next step, which reads the state and `read`. With `graphs`
        the hidden state keeps its graphs: for `go_back`, but not for replays in the backward pass.
        """
        state = detach(state)
        all_read = [*tensors(state), *read]
        rng = rng_state(self.device) if self.draws else None
        return Checkpoint(state, all_read, write_counts(all_read), rng, self.kept.save(graphs))

    @contextmanager
    def running_from(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Set generators and hidden state to the checkpoint in this context; restore them after."""
        self.check_unwritten(checkpoint.read, checkpoint.writes)
        with replay_rng(checkpoint.rng, self.device), self.kept.replaying(checkpoint.kept):
            yield

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Set generators and hidden state back to the checkpoint."""
        self.check_unwritten(checkpoint.read, checkpoint.writes)
        if checkpoint.rng is not None:
            set_rng_state(checkpoint.rng, self.device)
        self.kept.restore(checkpoint.kept)

    def check_unwritten(self, read: list[Tensor], writes: list[int]) -> None:
        """Raise if tensors that are read again have been written since `writes` were counted."""
        if write_counts(read) != writes:
            self._fail_changed("parameters, inputs and states")

    def note(self, moment: int, results: State) -> None:
        """Note the results of steps, for `compare`."""
        self._noted = moment, fingerprints_of(results)

    def compare(self, moment: int, results: State) -> None:
        """Raise if steps that run again have other results at the same moment than in `note`."""
        if self._noted is not None and self._noted[0] == moment:
            known, self._noted = self._noted[1], None
            self.check_same(results, known)

    def record(
        self, run: Callable[[State], Result], state: State, checked: Callable[[Result], State],
        start: Callable[[], Checkpoint], measure: Callable[[Tensor], None] | None = None,
    ) -> Result:  # fmt: skip
        """Return `run(state)`, with a graph that keeps no tensors. `measure` is called with each
        tensor that it would keep. The backward pass calls `run` again from the checkpoint that
        `start` then returns, and compares the part of the result that `checked` selects."""
        part = _Part(self, run, state, checked, start, measure)
        not_traced(part.pack, *([] if measure is None else [measure]))
        with self._saving_by(part.pack, part.unpack):
            result = run(state)
        part.measure, part.recorded = None, True
        part.results = fingerprints_of(checked(result))
        return result

    @contextmanager
    def measuring(self, shared: Sequence[Tensor]) -> Iterator[dict[int, int]]:
        """Measure a graph that is built in this context and keeps its tensors. Yield the bytes of
        each storage, without those of leaves, their views, and `shared` tensors."""
        sizes: dict[int, int] = {}
        strided = [t for t in shared if t.layout == torch.strided]  # others have no storage
        known = set(map(storage_key, strided))

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            has_storage = tensor.layout == torch.strided
            if has_storage and not (base_of(tensor).is_leaf or storage_key(tensor) in known):
                sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            # Detached: a node that keeps its own output with its graph would be a cycle.
            return tensor.detach(), write_count(tensor)

        def unpack(saved: tuple[Tensor, int]) -> Tensor:
            """Return the tensor; raise, as autograd does without hooks, if it was written since."""
            tensor, writes = saved
            if write_count(tensor) != writes:
                self._fail_changed(f"tensors that the {self.kept.name} reads")
            return tensor

        not_traced(pack, base_of)
        with self._saving_by(pack, unpack):
            yield sizes

    def unpack(self, part: _Part, index: int) -> Tensor:
        """Return a tensor that the graph of a part would have saved, and drop it here."""
        if not part.recorded:
            self._fail_differentiates()
        with self._lock:
            if self._tensors_of is not part.key or index not in self._tensors:
                self._tensors_of = None
                self._tensors = {}  # only one part's tensors exist at a time
                self._tensors = self._replay(part)
                self._tensors_of = part.key
            return self._tensors.pop(index)

    def _replay(self, part: _Part) -> dict[int, Tensor]:
        """Run a part again, and return the tensors that its graph would have saved."""
        saved: list[tuple[Tensor, int]] = []

        def pack(tensor: Tensor) -> None:
            saved.append((tensor.detach(), write_count(tensor)))

        not_traced(pack)
        with (
            torch.inference_mode(False), torch.enable_grad(), self.modes(),
            saved_tensors_hooks(pack, _never),
        ):  # fmt: skip
            result = part.run_again()
        if len(saved) != len(part.saved):
            self._fail(f"{len(saved)} tensors for it in place of {len(part.saved)}")
        for (tensor, writes), (shape, count) in zip(saved, part.saved, strict=True):
            if tensor.shape != shape:
                self._fail(f"a tensor of shape {list(tensor.shape)} in place of {list(shape)}")
            written = write_count(tensor) != writes  # after it was saved
            if written or (writes != count and not self.kept.holds(tensor)):
                self._fail_changed("parameters, inputs and states")
        self.check_same(result, part.results)
        return {index: tensor for index, (tensor, _) in enumerate(saved)}

    def check_same(self, results: State, known: list[Tensor]) -> None:
        """Raise if the results of a replay differ from those of the forward pass, whose
        fingerprints are known, by more than rounding: half of the digits of the dtype."""
        fingerprints = fingerprints_of(results)
        if len(fingerprints) != len(known):
            self._fail("another result")
        for tensor, now, then in zip(_dense(results), fingerprints, known, strict=True):
            if now.device.type == "cpu" and torch.equal(now, then):  # the usual case
                continue
            difference = (now - then).abs()
            if tensor.is_floating_point() or tensor.is_complex():
                difference -= math.sqrt(torch.finfo(tensor.dtype).eps) * tensor.detach().norm()
            if difference.device.type != "cpu":
                assert_on_device(~(difference > 0), self._differs("another result"))
            elif difference > 0:  # false for NaN, which is no error
                self._fail("another result")

    def _differs(self, got: str) -> str:
        contract = "do in its replay, for the backward pass, what it did in the forward pass"
        advice = "Hand on what one call keeps for the next in the state"
        return message(self.kept.op, self.kept.name, contract, got, advice)

    def _fail(self, got: str) -> NoReturn:
        raise RuntimeError(self._differs(got))

    def _fail_changed(self, what: str) -> NoReturn:
        contract = "be those of the forward pass until the backward pass has run"
        raise RuntimeError(message(self.kept.op, what, contract, "changed ones"))

    @contextmanager
    def _saving_by(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> Iterator[None]:
        """Set hooks for saved tensors. The functions of torch.func raise an error with them."""
        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                self._fail_differentiates(error)
            raise

    def _fail_differentiates(self, cause: RuntimeError | None = None) -> NoReturn:
        contract = "take no gradients inside of itself if steps run again"
        got, advice = "torch.autograd.grad, backward or torch.func", "tbptt takes such a step"
        if self.kept.op == "rollout":
            advice = "Pass checkpoint=steps, which keeps the graph"
        raise RuntimeError(message(self.kept.op, self.kept.name, contract, got, advice)) from cause


class WindowStarts:
    """Checkpoints before the steps at which windows begin that overlap the one before."""

    def __init__(self, replay: Replay, steps: Iterable[int]) -> None:
        self.replay, self._ahead = replay, set(steps)
        self._checkpoints: dict[int, Checkpoint] = {}

    def save(self, step: int, state: State) -> None:
        """Keep a checkpoint if a window begins with this step, when it runs for the first time."""
        if step in self._ahead:
            self._ahead.remove(step)
            self._checkpoints[step] = self.replay.checkpoint(state, graphs=True)

    def at(self, step: int) -> Checkpoint | None:
        """Return the checkpoint before a step, and drop earlier ones; None before its first run."""
        for earlier in [t for t in self._checkpoints if t < step]:
            del self._checkpoints[earlier]
        return self._checkpoints.get(step)

    def clear(self) -> None:
        """Drop all checkpoints, whose hidden state may have graphs."""
        self._checkpoints.clear()


class _Part:
    """Steps that run again in the backward pass, and shapes of the tensors that they save."""

    def __init__(
        self, owner: Replay, run: Callable[[State], Any], state: State,
        checked: Callable[[Any], State], start: Callable[[], Checkpoint],
        measure: Callable[[Tensor], None] | None,
    ) -> None:  # fmt: skip
        self.owner, self.run, self.checked, self.start = owner, run, checked, start
        self.measure = measure
        self.requires_grad = [tensor.requires_grad for tensor in tensors(state)]
        self.saved: list[tuple[torch.Size, int]] = []  # shapes and numbers of writes
        self.results: list[Tensor] = []
        self.recorded = False
        self.key = object()

    def run_again(self) -> State:
        """Run the steps again from their checkpoint, and return the results to be compared."""
        checkpoint, requires = self.start(), iter(self.requires_grad)
        with self.owner.running_from(checkpoint):
            state = map_tensors(
                lambda tensor: tensor.detach().requires_grad_(next(requires)), checkpoint.state
            )
            return self.checked(self.run(state))

    def pack(self, tensor: Tensor) -> int:
        if self.measure is not None:
            self.measure(tensor)
        self.saved.append((tensor.shape, write_count(tensor)))
        return len(self.saved) - 1

    def unpack(self, index: int) -> Tensor:
        return self.owner.unpack(self, index)


def _dense(results: State) -> list[Tensor]:
    return [t for t in tensors(results) if type(t) is Tensor and t.layout == torch.strided]


def fingerprints_of(results: State) -> list[Tensor]:
    """Return the dot product of each tensor with a ramp, which detects exchanged elements, too."""
    products = []
    for tensor in _dense(results):
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if values.dtype not in (torch.float32, torch.float64):
            values = values.float()
        values = values.reshape(-1)
        ramp = torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device)
        products.append(values.dot(ramp))
    return products


def _never(_: None) -> Tensor:
    raise AssertionError("the graph of a replay is dropped")


def _modes_now(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context with the present autocast and function modes, such as a default device."""
    of_functions = function_modes()
    modes = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted({"cpu", device.type})
        if torch.amp.is_autocast_available(kind)
    ]
    cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def as_now() -> Iterator[None]:
        with under_function_modes(of_functions), ExitStack() as stack:
            for kind, enabled, dtype in modes:
                mode = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached)
                stack.enter_context(mode)
            yield

    return as_now
