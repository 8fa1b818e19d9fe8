"""Steps under autograd whose graph keeps no tensors: the backward pass runs them again.

The graph is the one that the steps build. So gradients reach whatever they use, hooks run once, and
DistributedDataParallel sends what one backward pass makes. Only the tensors that it would save are
left out: each is a number, by which the tensor is found when the steps have been run again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from accumext.recurrence._generators import replay_rng, rng_state, set_rng_state
from accumext.recurrence._kept_state import KeptState, Snapshot
from accumext.recurrence._states import State, tensors
from accumext.tensors.checks import message
from accumext.tensors.torch_private import (
    assert_on_device,
    function_modes,
    not_traced,
    under_function_modes,
    write_count,
)


class Start(NamedTuple):
    """What steps find, beside their arguments: generators, and what their function has kept."""

    rng: tuple[Tensor, ...] | None  # None: nothing is drawn
    kept: Snapshot


class Replays:
    """The parts of one call's graph that its backward pass makes again."""

    def __init__(self, kept: KeptState, device: torch.device, draws: bool = True) -> None:
        self.kept, self.device, self.draws = kept, device, draws
        self.modes = _modes_now(device)  # a context with those of the forward pass
        # The tensors of the part that was run again last. It is known by its name, for a part holds
        # this object: without circles, all is freed with the graph.
        self._found: dict[int, Tensor] = {}
        self._found_of: object = None
        self._lock = threading.RLock()  # each device has a thread of its own in a backward pass

    def start(self, graphs: bool = False) -> Start:
        """What steps from here on find: tensors that were kept have graphs if steps go back."""
        return Start(rng_state(self.device) if self.draws else None, self.kept.save(graphs))

    @contextmanager
    def from_start(self, start: Start) -> Iterator[None]:
        """Steps in this context find what there was then, and leave what there is now."""
        with replay_rng(start.rng, self.device), self.kept.replaying(start.kept):
            yield

    def go_back(self, start: Start) -> None:
        """Put everything back to what it was then."""
        if start.rng is not None:
            set_rng_state(start.rng, self.device)
        self.kept.restore(start.kept)

    def record(
        self, run: Callable[[], State], again: Callable[[], State],
        measure: Callable[[Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """Call `run`, with a graph that keeps no tensors; each is given to `measure`. `again` does
        the same in the backward pass, `from_start` of it, and returns the same."""
        part = _Part(self, again, measure)
        not_traced(part.pack, *([] if measure is None else [measure]))
        with saving_by(self.kept.op, self.kept.name, part.pack, part.unpack):
            result = run()
        part.measure, part.recorded = None, True
        part.results = fingerprints_of(result)

    def unpack(self, part: _Part, index: int) -> Tensor:
        """A tensor that the graph of a part would have saved. It is given away."""
        if not part.recorded:
            raise RuntimeError(_differentiates(self.kept.op, self.kept.name))
        with self._lock:
            if self._found_of is not part.name or index not in self._found:
                self._found_of, self._found = None, {}  # one part's at a time
                self._found = self._replay(part)
                self._found_of = part.name
            return self._found.pop(index)

    def _replay(self, part: _Part) -> dict[int, Tensor]:
        """Run a part again for the tensors that its graph would have saved."""
        found: list[tuple[Tensor, int]] = []

        def pack(tensor: Tensor) -> None:
            found.append((tensor.detach(), write_count(tensor)))

        not_traced(pack)
        with (
            torch.inference_mode(False), torch.enable_grad(), self.modes(),
            saved_tensors_hooks(pack, _never),
        ):  # fmt: skip
            result = part.again()
        if len(found) != len(part.saved):
            self._fail(f"{len(found)} tensors for it in place of {len(part.saved)}")
        for (tensor, writes), (shape, count) in zip(found, part.saved, strict=True):
            if tensor.shape != shape:
                self._fail(f"a tensor of shape {list(tensor.shape)} in place of {list(shape)}")
            written = write_count(tensor) != writes  # after it was saved
            if written or (writes != count and not self.kept.holds(tensor)):
                raise RuntimeError(changed(self.kept.op))
        self.check_same(result, part.results)
        return {index: tensor for index, (tensor, _) in enumerate(found)}

    def check_same(self, results: State, known: list[Tensor]) -> None:
        """Raise unless a replay has come to the results of the forward pass, whose fingerprints are
        known, but for rounding: half of the digits of a dtype."""
        fingerprints = fingerprints_of(results)
        if len(fingerprints) != len(known):
            self._fail("another result")
        for tensor, now, then in zip(_dense(results), fingerprints, known, strict=True):
            if now.device.type == "cpu" and torch.equal(now, then):  # as a rule
                continue
            difference = (now - then).abs()
            if tensor.is_floating_point() or tensor.is_complex():
                difference -= math.sqrt(torch.finfo(tensor.dtype).eps) * tensor.detach().norm()
            if difference.device.type != "cpu":
                assert_on_device(~(difference > 0), self._differs("another result"))
            elif difference > 0:  # not for NaN
                self._fail("another result")

    def _differs(self, got: str) -> str:
        contract = "do in its replay, for the backward pass, what it did in the forward pass"
        advice = "Hand on what one call keeps for the next in the state"
        return message(self.kept.op, self.kept.name, contract, got, advice)

    def _fail(self, got: str) -> None:
        raise RuntimeError(self._differs(got))


class _Part:
    """Steps that run again in the backward pass, and the tensors that they save."""

    def __init__(
        self, owner: Replays, again: Callable[[], State], measure: Callable[[Tensor], None] | None
    ) -> None:
        self.owner, self.again, self.measure = owner, again, measure
        self.saved: list[tuple[torch.Size, int]] = []  # shapes and numbers of writes
        self.results: list[Tensor] = []
        self.recorded = False
        self.name = object()

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
    """Of every tensor its product with a ramp, which also tells exchanged elements."""
    found = []
    for tensor in _dense(results):
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if values.dtype not in (torch.float32, torch.float64):
            values = values.float()
        values = values.reshape(-1)
        ramp = torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device)
        found.append(values.dot(ramp))
    return found


def changed(op: str) -> str:
    """The error for tensors that are read again, but have been written since."""
    contract = "be those of the forward pass until the backward pass has run"
    return message(op, "parameters, inputs and states", contract, "changed ones")


@contextmanager
def saving_by(
    op: str, name: str, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Hooks for saved tensors. The functions of torch.func refuse them."""
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    except RuntimeError as error:
        if "support saved tensor hooks" in str(error):
            raise RuntimeError(_differentiates(op, name)) from error
        raise


def _differentiates(op: str, name: str) -> str:
    contract = "take no gradients inside of itself where steps run again"
    got = "torch.autograd.grad, backward or torch.func"
    keeps = "Pass checkpoint=steps, which keeps the graph"
    return message(op, name, contract, got, keeps if op == "rollout" else "tbptt takes such a step")


def _never(_: None) -> Tensor:
    raise AssertionError("the graph of a replay is dropped")


def _modes_now(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context with the modes of now: autocast, and those of functions, as the default device."""
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
