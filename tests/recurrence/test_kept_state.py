"""Cells that keep state of their own, in every way there is, against plain autograd.

Gradients, and what the cell has kept afterwards, are those of the plain loop, where steps run again
in the backward pass, too.
"""

import itertools
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import relative_distance
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrizations, parametrize, spectral_norm
from torch.overrides import TorchFunctionMode

import accumext
from accumext.decoder import _plan
from accumext.recurrence import KeptState

EXACT = 1e-12  # relative, float64: two orders of summation of a few hundred terms
STEPS, BATCH, SIZE, VOCABULARY = 20, 3, 4, 7
Cell = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Mixes(nn.Module):
    """A GRU cell that reads something from the call before, beside its input."""

    made: ClassVar[list["Mixes"]] = []  # in this test

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)
        self.gru = nn.GRUCell(SIZE, SIZE, dtype=torch.float64)
        self.mix = nn.Linear(SIZE, SIZE, dtype=torch.float64)

    def step(self, x: Tensor, h: Tensor, before: Any) -> Tensor:
        return self.gru(x if before is None else x + self.mix(before), h)


class Attribute(Mixes):
    """The last output, detached, as location-aware attention keeps its alignment."""

    before: Any = None

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(x, h, self.before)
        self.before = h.detach()
        return h, h


class WithGraph(Attribute):
    """The same with its graph: gradients flow through the attribute."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.before = self.step(x, h, self.before)
        return h, h


class Pair(NamedTuple):
    h: Tensor
    others: tuple[Tensor, ...]


class InTuples(Attribute):
    """The same in a tuple in a named tuple."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.before is not None:
            x = x + self.before.h * self.before.others[0].mean()
        h = self.step(x, h, None)
        self.before = Pair(h, (h * 1,))
        return h, h


class CachesProjection(Mixes):
    """Keys of a memory, which the first call projects."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.keys = torch.linspace(-1, 1, 5 * SIZE).double().view(5, SIZE), None

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.keys = self.mix(self.memory)
        h = self.gru(x + (h @ self.keys.T).softmax(-1) @ self.keys, h)
        return h, h


class Counts(Mixes):
    calls = 0

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        h = self.step(x * 0.9**self.calls, h, None)
        return h, h


class Collects(Mixes):
    """A list, a dict, a set and a bounded deque."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}
        self.last: deque[Tensor] = deque(maxlen=3)
        self.lengths: set[int] = set()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        before = sum([*self.seen[-2:], *self.by_name.values(), *self.last, 0.1 * len(self.lengths)])
        h = self.step(x, h, before if isinstance(before, Tensor) else None)
        self.seen.append(h.detach())
        self.by_name["h" if len(self.seen) % 2 else "k"] = h.detach()
        self.last.append(h.detach())
        self.lengths.add(len(self.seen))
        return h, h


class Buffers(Mixes):
    """One that is replaced, and one that calls write into, from call `since` on."""

    def __init__(self, size: int = 9, since: int = 0) -> None:
        super().__init__()
        self.since = since
        self.register_buffer("total", torch.zeros(SIZE, dtype=torch.float64))
        self.register_buffer("ring", torch.zeros(size, SIZE, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(x, h, self.total + self.ring[:9].sum(0))
        self.total = self.total + h.detach().mean(0) / STEPS
        if self.calls >= self.since:
            self.ring[int(self.calls) % 9] = h.detach().mean(0)
        self.calls += 1
        return h, h


class Allocates(Mixes):
    """A tensor that the first call makes, and all of them write into."""

    at, trace = 0, None

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.trace is None:
            self.trace = torch.zeros(2 * STEPS, BATCH, SIZE, dtype=torch.float64)
        h = self.step(x, h, self.trace.sum(0))
        self.trace[self.at] = h.detach()
        self.at += 1
        return h, h


class AllocatesAgain(Allocates):
    """Such a tensor every third call, so that one may have the address of an earlier one."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.at % 3 == 0:
            self.trace = None
        return super().forward(x, h)


class Holds(Mixes):
    """A sparse tensor, which is not watched, and one made in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.eye(SIZE, dtype=torch.float64).roll(1, 0).to_sparse()
        with torch.inference_mode():
            self.shift = torch.ones(SIZE, dtype=torch.float64)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step((self.graph @ x.T).T + self.shift, h, None)
        return h, h


class Resizes(Mixes):
    """A buffer that calls make longer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, SIZE, dtype=torch.float64))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(x, h, self.rows.mean(0))
        self.rows.resize_(len(self.rows) + 1, SIZE)[-1] = h.detach().mean(0)
        return h, h


class Normalises(Mixes):
    """Running statistics, which kernels write without counting it."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norm = norm(SIZE, dtype=torch.float64, track_running_stats=True)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(x, self.norm(torch.stack([h, x], -1)).sum(-1), None)
        return h, h


class Spectral(Mixes):
    """Power iterations in every call."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        with torch.no_grad():
            self.mix.weight.normal_()
        self.mix = norm(self.mix)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(x, h, h)
        return h, h


class Draws(Mixes):
    """From generators that are not torch's global one."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(0)
        self.generator, self.own = torch.Generator().manual_seed(1), random.Random(1)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x = x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        h = self.step(x * random.random() * self.own.random(), h, None)
        return h, h


class Layers(Mixes):
    """Keys of all steps, in an object in a list in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = OfLayers()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.cache.layers[0]
        layer.keys = h[:, None] if layer.keys is None else torch.cat([layer.keys, h[:, None]], 1)
        read = F.scaled_dot_product_attention(h[:, None], layer.keys, layer.keys)
        h = self.step(x, h, read[:, 0])
        return h, h


class OfLayer:
    keys = None


class OfLayers:
    def __init__(self) -> None:
        self.layers = [OfLayer()]


class Deletes(Mixes):
    """An attribute, in every other call."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        before = vars(self).pop("before", None)
        h = self.step(x, h, before)
        if before is None:
            self.before = h.detach()
        return h, h


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"cell": inner})

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return self.inner["cell"](x, h)


class Swaps(Mixes):
    """Two of its modules, in every call; and calls a scripted one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(SIZE, SIZE, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            inner = nn.Sequential(nn.BatchNorm1d(SIZE), nn.Tanh())
            self.scripted = torch.jit.script(inner.double())

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.mix, self.other = self.other, self.mix
        h = self.step(x, h, self.scripted(h))
        return h, h


class OfObject:
    """The cell is a method of an object that is no module."""

    def __init__(self) -> None:
        self.inner, self.before = Mixes(), None

    def __call__(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner.step(x, h, self.before)
        self.before = h.detach()
        return h, h


class OwnMethod(Mixes):
    """The cell is a method of a module that is not called itself."""

    before = None

    def walk(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(x, h, self.before)
        self.before = h.detach()
        return h, h


class Counting(nn.Linear):
    """One of torch's modules, whose __call__ does more."""

    calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return 0.9**self.calls * super().__call__(*args)


def around_linear(change: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    """One of torch's modules in the cell is changed."""

    def make() -> Any:
        inner = Mixes()
        change(inner.mix)
        return lambda x, h: (inner.step(x, h, h),) * 2

    return make


def own_call(module: nn.Module) -> None:
    module.__class__ = Counting


def replaced_forward(module: nn.Module) -> None:
    forward, seen = module.forward, SimpleNamespace(calls=0)

    def counting(*args: Any) -> Any:
        seen.calls += 1
        return 0.9**seen.calls * forward(*args)

    module.forward = counting


def hooked(module: Any, register: str = "register_forward_pre_hook") -> tuple[Any, nn.Module]:
    """By a module that only the hook knows, and by random numbers."""
    norm, calls = nn.BatchNorm1d(SIZE, dtype=torch.float64), []

    def hook(module: nn.Module, *given: Any) -> Any:
        tensor = given[0][0] if register == "register_forward_pre_hook" else given[-1]
        if module is norm or tensor.shape[-1] != SIZE:
            return None
        calls.append(len(calls))
        return F.dropout(norm(tensor), 0.3) * 0.9 ** len(calls)

    return getattr(module, register)(hook), norm


def closure() -> Any:
    """Variables of a closure: one that is assigned, an object, and a helper with its own."""
    inner, before, seen = Mixes(), None, SimpleNamespace(last=0.0, calls=[])

    def scale() -> float:
        seen.calls.append(len(seen.calls))
        return 0.9 ** len(seen.calls)

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal before
        cell.calls = getattr(cell, "calls", 0) + 1
        x = x * scale() * 0.9**cell.calls
        h = inner.step(x, h, None if before is None else before + seen.last)
        before, seen.last = h.detach(), float(h.detach().mean())
        return h, h

    return cell


_before: Any = None


def unbound() -> Any:
    """A variable of a closure that only the first call gives a value."""
    inner = Mixes()

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal before
        try:
            x = x + before
        except NameError:
            x = x * 2
        h = inner.step(x, h, None)
        before = h.detach()
        return h, h

    before: Any = None
    del before
    return cell


def global_variable() -> Any:
    global _before
    inner, _before = Mixes(), None

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        global _before
        h = inner.step(x, h, _before)
        _before = h.detach()
        return h, h

    return cell


def in_partial() -> Any:
    def cell(inner: OfObject, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return inner(x, h)

    return partial(cell, OfObject())


def of_default() -> Any:
    inner = OfObject()
    return lambda x, h, inner=inner: inner(x, h)


KINDS: dict[str, Callable[[], Any]] = {
    "attribute": Attribute,
    "attribute with graph": WithGraph,
    "cached projection": CachesProjection,
    "counter": Counts,
    "containers": Collects,
    "buffers": Buffers,
    "a buffer that is written later": partial(Buffers, since=STEPS // 2),
    "allocates": Allocates,
    "a buffer that is resized": Resizes,
    "batch norm": partial(Normalises, nn.BatchNorm1d),
    "instance norm": lambda: Normalises(nn.InstanceNorm1d),
    "spectral norm": partial(Spectral, parametrizations.spectral_norm),
    "spectral norm by hooks": partial(Spectral, spectral_norm),
    "modules": Swaps,
    "object": OfObject,
    "method": lambda: Attribute().forward,
    "method of its own": lambda: OwnMethod().walk,
    "own call": around_linear(own_call),
    "replaced forward": around_linear(replaced_forward),
    "hook": around_linear(hooked),
    "closure": closure,
    "default": of_default,
    "global": global_variable,
    "generators": Draws,
    "objects in objects": Layers,
    "deletes": Deletes,
    "partial": in_partial,
    "inside another": lambda: Inside(Attribute()),
    "tuples with graphs": InTuples,
    "a variable without a value": unbound,
    "other tensors": Holds,
}


class World:
    """A cell of one kind, the same every time, and what is around it."""

    def __init__(self, kind: str | Callable[[], Any]) -> None:
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, SIZE, dtype=torch.float64)
        self.head = nn.Linear(SIZE, VOCABULARY, dtype=torch.float64)
        self.targets = torch.randint(VOCABULARY, (STEPS, BATCH))
        self.h = torch.randn(BATCH, SIZE, dtype=torch.float64, requires_grad=True)
        Mixes.made.clear()
        self.cell: Cell = (KINDS[kind] if isinstance(kind, str) else kind)()
        (self.inner,) = Mixes.made
        parts = (self.embedding, self.head, self.inner)
        self.leaves = [self.h, *(p for part in parts for p in part.parameters())]

    def plain(self) -> Tensor:
        h, tokens, losses = self.h, torch.zeros_like(self.targets[0]), []
        for target in self.targets:
            output, h = self.cell(self.embedding(tokens), h)
            losses.append(F.cross_entropy(self.head(output), target))
            tokens = target
        return torch.stack(losses).mean()

    def plain_greedy(self) -> Tensor:
        h, tokens, losses = self.h, torch.zeros(BATCH, dtype=torch.int64), []
        for target in self.targets:
            output, h = self.cell(self.embedding(tokens), h)
            logits = self.head(output)
            losses.append(F.cross_entropy(logits, target))
            tokens = logits.argmax(1)
        return torch.stack(losses).mean()

    def decoded(self, **options: Any) -> Tensor:
        call = {"feedback": "teacher", **options}
        parts = (self.embedding, self.cell, self.head, self.targets, self.h)
        return accumext.decode_loss(*parts, **call).loss

    def plain_rollout(self) -> Tensor:
        x = h = self.h
        losses = []
        for _ in range(STEPS):
            x, h = self.cell(x, h)
            losses.append(x.square().mean())
        return torch.stack(losses).mean()

    def rollout(self, **options: Any) -> Tensor:
        call = {"loss": lambda x, t: x.square().mean(), "start": self.h, **options}
        return accumext.rollout(self.cell, self.h, STEPS, **call).loss

    def after(self) -> list[Tensor]:
        """What another call makes of what the cell has kept, and its buffers."""
        with torch.no_grad():
            x = torch.ones(BATCH, SIZE, dtype=torch.float64)
            return [*self.cell(x, x), *self.inner.buffers()]

    def gradients(self, loss: Tensor, **options: Any) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.leaves, materialize_grads=True, **options))


@pytest.fixture(autouse=True)
def few_steps_are_kept(monkeypatch):
    """Small graphs are kept, and run once."""
    monkeypatch.setattr(_plan, "KEPT_GRAPH", 2**13)


DECODED: list[dict[str, Any]] = [{}, {"memory_budget": 4000}, {"lengths": [STEPS] * BATCH}]
ROLLOUTS: list[dict[str, Any]] = [
    {},
    {"checkpoint": 1},
    {"checkpoint": 7},
    {"memory_budget": 60000},
]
WAYS = [("decoded", o) for o in DECODED] + [("rollout", o) for o in ROLLOUTS]
ways = pytest.mark.parametrize(("way", "options"), WAYS, ids=str)
# Each kind in both ways, and each option with some kinds: all look at a cell with the same code.
IN_BOTH_WAYS = [
    (kind, *case)
    for index, kind in enumerate(KINDS)
    for case in (WAYS[index % len(DECODED)], WAYS[len(DECODED) + index % len(ROLLOUTS)])
]


def plain(kind: Any, way: str) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Loss, gradients, and what is kept afterwards."""
    world = World(kind)
    loss = world.plain() if way == "decoded" else world.plain_rollout()
    return loss, world.gradients(loss), world.after()


@pytest.mark.parametrize(("kind", "way", "options"), IN_BOTH_WAYS, ids=str)
def test_a_cell_that_keeps_state(kind, way, options):
    """Also in a second backward pass, with the same bits."""
    loss, expected, after = plain(kind, way)
    world = World(kind)
    found = getattr(world, way)(**options)
    torch.testing.assert_close(found, loss, rtol=EXACT, atol=EXACT)
    first = world.gradients(found, retain_graph=True)
    assert relative_distance(first, expected) < EXACT
    assert relative_distance(world.gradients(found), first) == 0
    torch.testing.assert_close(world.after(), after, rtol=EXACT, atol=EXACT)


@ways
def test_what_is_changed_between_the_passes_stays_changed(way, options):
    """A module may be reset, or be in another mode, before the backward pass; a list of the user's
    may grow while it runs."""
    _, expected, _ = plain("containers", way)
    world = World("containers")
    cell: Any = world.cell
    found = getattr(world, way)(**options)
    cell.seen.clear()
    cell.by_name, cell.last = {}, None
    cell.eval()
    world.h.register_hook(cell.seen.append)
    assert relative_distance(world.gradients(found), expected) < EXACT
    assert len(cell.seen) > 0
    assert not cell.training
    assert (cell.by_name, cell.last) == ({}, None)


class Scales(TorchFunctionMode):
    """What torch's linear layers return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 0.5 * found if func is F.linear else found


@ways
@pytest.mark.parametrize(
    "mode", [Scales, partial(torch.device, "meta")], ids=["functions", "device"]
)
@pytest.mark.parametrize("backward", [nullcontext, torch.inference_mode])
def test_steps_run_again_under_the_modes_of_the_forward_pass(mode, backward, way, options):
    """The default device is one of them. The head is called, too, where functions change."""

    def cell(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = world.inner.mix(world.inner.gru(x, h))
        h = h if torch.empty(()).is_meta else 2 * h
        return h, h

    found = []
    for run in (
        World.plain if way == "decoded" else World.plain_rollout,
        partial(getattr(World, way), **options),
    ):
        world = World("counter")
        world.cell = cell
        with mode():
            loss = run(world)
        with backward():
            found += [[loss.detach()], world.gradients(loss)]
    assert relative_distance(found[2], found[0]) < EXACT
    assert relative_distance(found[3], found[1]) < EXACT


@ways
@pytest.mark.parametrize("kind", ["batch norm", "spectral norm"])
def test_the_mode_of_torchs_modules_is_that_of_the_forward_pass(kind, way, options):
    _, expected, after = plain(kind, way)
    world = World(kind)
    found = getattr(world, way)(**options)
    world.inner.eval()
    assert relative_distance(world.gradients(found), expected) < EXACT
    assert not any(module.training for module in world.inner.modules())
    world.inner.train()
    torch.testing.assert_close(world.after(), after, rtol=EXACT, atol=EXACT)


BUDGETS = [{}, {"checkpoint": 4}, {"memory_budget": 14000}]


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize(
    ("way", "options"), [*(("decoded", o) for o in DECODED), *(("rollout", o) for o in BUDGETS)]
)
@pytest.mark.parametrize("kind", ["parametrized", "cached projection"])
def test_weights_that_parametrize_caches(kind, way, options, backward_inside):
    """`with parametrize.cached():` keeps tensors with graphs, as a cell may; rollouts pass over
    steps, too."""
    found = []
    plainly = World.plain if way == "decoded" else World.plain_rollout
    for run in (plainly, partial(getattr(World, way), **options)):
        world = World("counter" if kind == "parametrized" else kind)
        if kind == "parametrized":
            parametrizations.weight_norm(world.inner.gru, "weight_hh")
        world.leaves = [world.h, *world.inner.parameters()]
        with parametrize.cached():
            loss = run(world)
            gradients = world.gradients(loss) if backward_inside else []
        found.append((loss, gradients or world.gradients(loss)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=EXACT, atol=EXACT)
    assert relative_distance(found[1][1], found[0][1]) < EXACT


class Halves(Tensor):
    """Half of what torch's linear layers return; the loss is such a tensor, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return 0.5 * found if func is F.linear else found


def linear() -> Any:
    inner = Mixes()
    return lambda x, h: (inner.step(x, h, h),) * 2


@ways
def test_steps_run_again_with_the_functions_of_a_subclass(way, options):
    found = []
    plainly = World.plain if way == "decoded" else World.plain_rollout
    for run in (plainly, partial(getattr(World, way), **options)):
        world = World(linear)
        for layer in (world.head, world.inner.mix):
            layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Halves))
        world.leaves = [world.h, *world.inner.parameters(), *world.embedding.parameters()]
        loss = run(world)
        found.append((loss, world.gradients(loss)))
    assert isinstance(found[0][0], Halves)
    assert relative_distance([found[1][0].detach()], [found[0][0].detach()]) < EXACT
    assert relative_distance(found[1][1], found[0][1]) < EXACT


def test_a_backward_pass_that_fails_leaves_what_is_kept():
    world = World("containers")
    cell: Any = world.cell
    loss = world.decoded(memory_budget=4000)
    seen, fails = list(cell.seen), True

    def stop(module: Any, given: Any, result: Any) -> None:
        if fails:
            raise ZeroDivisionError

    cell.gru.register_forward_hook(stop)
    with pytest.raises(ZeroDivisionError):
        world.gradients(loss, retain_graph=True)
    assert all(map(torch.equal, cell.seen, seen))
    assert len(cell.seen) == len(seen) == STEPS
    fails = False
    assert relative_distance(world.gradients(loss), plain("containers", "decoded")[1]) < EXACT


# --- windows --------------------------------------------------------------------------------------


def in_the_state(x: Tensor, state: Any, inner: Mixes) -> tuple[Tensor, Any]:
    """`Attribute` with all that it keeps in its state."""
    h, before = state
    h = inner.step(x, h, before)
    return h, (h, h.detach())


@pytest.mark.parametrize("k1", [3, 7])
@pytest.mark.parametrize("more", [0, 2, 8])
@pytest.mark.parametrize("way", ["decoded", "rollout", "tbptt"])
def test_windows_begin_with_what_was_kept_there(way, k1, more):
    """As with the state, in which it could be handed on."""
    found = []
    for explicit in (False, True):
        world = World("attribute")
        periods = {"k1": k1, "k2": k1 + more}
        cell: Any = world.cell
        state: Any = world.h
        if explicit:
            world.cell(torch.zeros_like(world.h), world.h)  # makes nothing of the first step
            cell = partial(in_the_state, inner=world.inner)
            state = world.h, torch.zeros_like(world.h)
        else:
            cell.before = torch.zeros_like(world.h)
        if way == "decoded":
            parts = (world.embedding, cell, world.head, world.targets, state)
            loss = accumext.decode_loss(*parts, feedback="greedy", **periods).loss
        elif way == "rollout":
            call = {"loss": lambda x, t: x.square().mean(), "start": world.h}
            loss = accumext.rollout(cell, state, STEPS, **call, **periods).loss
        else:

            def step(token: Tensor, state: Any, cell: Any = cell, world: World = world) -> Any:
                output, state = cell(world.embedding(token), state)
                return world.head(output), state

            accumext.tbptt(step, world.targets, state, criterion=F.cross_entropy, **periods)
            found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in world.leaves])
            continue
        found.append(world.gradients(loss))
    assert relative_distance(found[0], found[1]) < EXACT


class Logs(Attribute):
    """Also its outputs with their graphs, which nothing reads, in an attribute and a tuple."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h, _ = super().forward(x, h)
        self.output, self.pair = h, (h, x)
        return h, h


def in_windows(world: World, way: str, k1: int, k2: int) -> list[Tensor]:
    if way != "tbptt":
        return world.gradients(getattr(world, way)(k1=k1, k2=k2))

    def step(token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        output, h = world.cell(world.embedding(token), h)
        return world.head(output), h

    periods = {"k1": k1, "k2": k2}
    accumext.tbptt(step, world.targets, world.h, criterion=F.cross_entropy, **periods)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in world.leaves]


@pytest.mark.parametrize("k1", [7, STEPS])
@pytest.mark.parametrize("kind", ["attribute", "buffers", "generators"])
def test_windows_of_tbptt_that_all_begin_with_the_first_step(kind, k1):
    """Together they are the plain loop, for the initial state, too."""
    found = in_windows(World(kind), "tbptt", k1, STEPS)
    expected = World(kind)
    exact = expected.gradients(expected.plain_greedy())
    assert relative_distance(found[:1], exact[:1]) < EXACT
    assert relative_distance(found, exact) < EXACT


def test_a_tensor_that_lies_where_an_earlier_one_did():
    """It is watched, too: else a window would find in it what later steps have written."""
    in_windows(World(AllocatesAgain), "tbptt", 1, 4)


KEEPS_GRAPH = (
    "must keep no tensor with a graph from one call to the next where k1 < k2, got one of shape "
    r"\[\d, 4\]. Hand it on in the state, pass it as context, or detach it$"
)
FREED = (
    "tbptt: step must keep no tensor with a graph from one window to the next, got one whose "
    "graph the backward pass of an earlier window has freed. Pass it as context, hand it on in the "
    "state, or detach it"
)


@pytest.mark.parametrize("kind", ["attribute with graph", "cached projection"])
def test_a_tensor_with_a_graph_that_is_kept_where_windows_overlap(kind):
    """The first pass of `decode_loss` has no graph. That of `rollout` has, and the projection may
    as well be made before."""
    with pytest.raises(RuntimeError, match=f"^decode_loss: cell {KEEPS_GRAPH}"):
        in_windows(World(kind), "decoded", 2, 5)
    found = in_windows(World(kind), "decoded", STEPS, STEPS + 5)  # one window
    assert relative_distance(found, plain(kind, "decoded")[1]) < EXACT
    if kind == "cached projection":
        for k1, k2 in ((2, 5), (5, 9)):
            world = World(kind)
            cell: Any = world.cell
            cell.keys = cell.mix(cell.memory)
            expected = in_windows(world, "rollout", k1, k2)
            assert relative_distance(in_windows(World(kind), "rollout", k1, k2), expected) < EXACT


@pytest.mark.parametrize("way", ["rollout", "tbptt"])
def test_a_tensor_with_a_graph_that_nothing_reads_may_be_kept(way):
    expected = in_windows(World("attribute"), way, 2, 5)
    assert relative_distance(in_windows(World(Logs), way, 2, 5), expected) < EXACT


@pytest.mark.parametrize("k2", [2, 5])
@pytest.mark.parametrize("kind", ["attribute with graph", "cached projection"])
def test_tbptt_says_that_a_graph_which_is_kept_has_been_freed(kind, k2):
    with pytest.raises(RuntimeError, match=f"^{FREED}$"):
        in_windows(World(kind), "tbptt", 2, k2)


@pytest.mark.parametrize(("way", "options"), [*WAYS, ("rollout", {"k1": 2, "k2": 5})], ids=str)
def test_a_graph_without_a_backward_pass_is_freed(way, options):
    """Although it holds what its replays need, of which some has that graph."""
    world, outputs = World(Logs), []
    for _ in range(3):
        out = getattr(world, way)(**options)
        outputs.append(weakref.ref(world.inner.output))
    del out
    assert [output() is not None for output in outputs] == [False, False, True]


# --- what cannot be put back ----------------------------------------------------------------------

LARGE = 10_000  # rows of a buffer of 320 kB


@ways
def test_a_large_buffer(way, options):
    """It is copied as soon as a call has written it: in `decode_loss` the first step runs once."""
    kind = partial(Buffers, LARGE)
    world = World(kind)
    if way == "decoded" and "memory_budget" not in options:
        _, expected, after = plain(kind, way)
        assert relative_distance(world.gradients(world.decoded(**options)), expected) < EXACT
        torch.testing.assert_close(world.after(), after, rtol=EXACT, atol=EXACT)
        return
    op, name = ("decode_loss", "cell") if way == "decoded" else ("rollout", "step")
    loss = getattr(world, way)(**options)
    ring = world.inner.ring.clone()
    text = (
        f"{op}: {name} must write into no tensor of its own above 65536 bytes after steps that run "
        r"again, got a write into one of shape \[10000, 4\]. Hand it on in the state: a new tensor "
        "in place of a write"
    )
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        world.gradients(loss)
    assert torch.equal(world.inner.ring, ring)


def test_large_tensors_that_calls_only_read_are_not_copied():
    """One that was filled before, one that a call makes; one that it has written into is."""

    class Reads(nn.Module):
        keys = None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(LARGE, SIZE).normal_())

        def forward(self) -> None:
            self.keys = self.table + 1
            self.trace = torch.zeros(LARGE, SIZE).add_(1)

    cell = Reads()
    kept = KeptState("rollout", "step", cell)
    cell()
    assert [copy.content is None for copy in kept.save().copies] == [True, True, False]


class Unseen(Mixes):
    """Counts its calls where nobody looks, in an iterator."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.calls, self.function = itertools.count(), function

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(self.function(x, next(self.calls) >= STEPS), h, None)
        return h, h


@ways
@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x, again: x + 0.01 * again, "another result"),
        (lambda x, again: x.flip(0) if again else x * 1, "another result"),
        (lambda x, again: x.exp().log() if again else x, r"\d+ tensors for it in place of \d+"),
        (lambda x, again: x if again else x.exp().log(), r"\d+ tensors for it in place of \d+"),
        (
            lambda x, again: F.pad(x, (0, 1 + again)).exp().log()[:, :SIZE],
            r"a tensor of shape \[3, 6\] in place of \[3, 5\]",
        ),
    ],
    ids=["values", "order", "more", "fewer", "shape"],
)
def test_a_replay_that_does_something_else_is_an_error(function, got, way, options):
    op, name = ("decode_loss", "cell") if way == "decoded" else ("rollout", "step")
    text = (
        f"{op}: {name} must do in its replay, for the backward pass, what it did in the forward "
        f"pass, got {got}. Hand on what one call keeps for the next in the state"
    )
    world = World(partial(Unseen, function))
    loss = getattr(world, way)(**options)
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        world.gradients(loss)


class OfClass(Mixes):
    calls = 0

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        OfClass.calls += 1
        h = self.step(x * 0.9**OfClass.calls, h, None)
        return h, h


@dataclass(slots=True)
class Slots:
    before: Tensor | None = None


class InSlots(Mixes):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Slots()

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(x, h, self.kept.before)
        self.kept.before = h.detach()
        return h, h


@pytest.mark.parametrize("kind", [OfClass, InSlots])
@ways
def test_places_that_are_not_looked_at_are_no_silent_mistake(kind, way, options):
    OfClass.calls = 0
    world = World(kind)
    loss = getattr(world, way)(**options)
    with pytest.raises(RuntimeError, match="must do in its replay"):
        world.gradients(loss)


class Begins(InSlots):
    """The first call alone does more."""

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if self.kept.before is None:
            self.kept.before = h.detach()
            x = x * 3
        return (self.step(x, h, h),) * 2


@pytest.mark.parametrize("kind", [OfClass, InSlots, Begins])
@pytest.mark.parametrize("way", ["decoded", "rollout", "tbptt"])
def test_nor_are_they_where_windows_overlap(kind, way):
    """A window that goes back behind the end of another one comes to the same results there."""
    OfClass.calls = 0
    with pytest.raises(RuntimeError, match="must do in its replay"):
        in_windows(World(kind), way, 7, 40)


def test_nor_are_they_in_the_last_window_of_a_rollout():
    """Whose graph is kept, so that nothing runs again."""
    world = World(partial(Unseen, lambda x, again: x))
    calls = itertools.count(1)
    world.inner.function = lambda x, again: x * 3 if next(calls) == STEPS else x
    with pytest.raises(RuntimeError, match="must do in its replay"):
        world.rollout(k1=STEPS - 1, k2=STEPS, checkpoint=STEPS)


class ScaledHead(nn.Linear):
    """A head by the number of its calls."""

    def __init__(self) -> None:
        super().__init__(SIZE, VOCABULARY, dtype=torch.float64)
        self.calls = itertools.count(1)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) * 0.9 ** next(self.calls)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 4000}, {"k1": 7, "k2": 40}], ids=str)
def test_nor_in_a_head_that_is_called(options):
    world = World("attribute")
    world.head = ScaledHead()
    with pytest.raises(RuntimeError, match="must do in its replay"):
        world.decoded(**options).backward()


@pytest.mark.parametrize("options", [{}, {"memory_budget": 4000}, {"k1": 7, "k2": 40}], ids=str)
def test_a_head_that_is_called_keeps_and_draws(options):
    """Also at steps that only lead to those whose losses count: here every window begins at 0."""
    found = []
    for way in (World.plain, partial(World.decoded, **options)):
        world = World("generators")
        world.head = Counted()
        world.leaves = [world.h, *world.inner.parameters(), *world.head.parameters()]
        found.append((world, way(world)))
    torch.testing.assert_close(found[1][1], found[0][1], rtol=EXACT, atol=EXACT)
    expected, gradients = (world.gradients(loss) for world, loss in found)
    assert relative_distance(gradients, expected) < EXACT


HOOKED = {
    "head": lambda world: hooked(world.head),
    "embedding": lambda world: hooked(world.embedding, "register_forward_hook"),
    "cell": lambda world: hooked(world.inner.gru, "register_forward_hook"),
    "all modules": lambda world: hooked(of_all, "register_module_forward_hook"),
}


@pytest.mark.parametrize("options", [{"memory_budget": 4000}, {"k1": 7, "k2": 40}], ids=str)
@pytest.mark.parametrize("part", HOOKED)
def test_hooks_of_torchs_modules_keep_and_draw(part, options):
    """The cell draws nothing itself: it is nn.GRUCell."""
    found = []
    for way in (World.plain, partial(World.decoded, **options)):
        world = World("counter")
        world.cell = world.inner.gru if way is not World.plain else twice(world.inner.gru)
        handle, norm = HOOKED[part](world)
        loss = way(world)
        found.append((loss, world.gradients(loss), list(norm.buffers())))
        handle.remove()
    torch.testing.assert_close(found[1][0], found[0][0], rtol=EXACT, atol=EXACT)
    assert relative_distance(found[1][1], found[0][1]) < EXACT
    torch.testing.assert_close(found[1][2], found[0][2], rtol=EXACT, atol=EXACT)


NORMED: dict[str, tuple[Callable[[World], nn.Module], str]] = {
    "head": (lambda world: world.head, "weight"),
    "embedding": (lambda world: world.embedding, "weight"),
    "cell": (lambda world: world.inner.gru, "weight_hh"),
}


@pytest.mark.parametrize("trains", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 4000}], ids=str)
@pytest.mark.parametrize("part", NORMED)
def test_weights_that_every_call_forms_anew(part, options, trains):
    """A step of the power iteration per call, and none by reading the weight."""
    found = []
    for way in (World.plain, partial(World.decoded, **options)):
        world = World("counter")
        world.cell = world.inner.gru if way is not World.plain else twice(world.inner.gru)
        of, name = NORMED[part]
        module = parametrizations.spectral_norm(of(world), name).train(trains)
        loss = way(world)
        found.append(([loss.detach()], world.gradients(loss), list(module.buffers())))
    for here, expected in zip(found[1], found[0], strict=True):
        assert relative_distance(here, expected) < EXACT


def twice(cell: nn.GRUCell) -> Cell:
    return lambda x, h: (cell(x, h),) * 2


class Counted(nn.Linear):
    calls = 0

    def __init__(self) -> None:
        super().__init__(SIZE, VOCABULARY, dtype=torch.float64)

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(F.dropout(h, 0.3)) * 0.9**self.calls


class Differentiates(Mixes):
    """Descends an energy."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(x, h - 0.1 * self.how(lambda z: self.mix(z).tanh().square().sum(), h), None)
        return h, h


def by_autograd(energy: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    with torch.enable_grad():
        z = h if h.requires_grad else h.detach().requires_grad_()
        return torch.autograd.grad(energy(z), z, create_graph=True)[0]


def by_func(energy: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    result: Tensor = torch.func.grad(energy)(h)
    return result


@ways
@pytest.mark.parametrize("how", [by_autograd, by_func])
def test_a_step_that_takes_gradients_inside_of_itself(how, way, options):
    op, name = ("decode_loss", "cell") if way == "decoded" else ("rollout", "step")
    text = f"^{op}: {name} must take no gradients inside of itself where steps run again, got "
    with pytest.raises(RuntimeError, match=text):
        getattr(World(partial(Differentiates, how)), way)(**options)
    kind = partial(Differentiates, how)
    found = World(kind)
    gradients = found.gradients(found.rollout(checkpoint=STEPS))
    assert relative_distance(gradients, plain(kind, "rollout")[1]) < EXACT
    expected = World(kind)
    for k2 in (STEPS, 7):  # one window; then several, which all begin with the first step
        world = World(kind)
        gradients = in_windows(world, "tbptt", k2, STEPS)
        exact = expected.gradients(expected.plain_greedy())
        assert relative_distance(gradients, exact) < EXACT


def test_a_saved_tensor_that_the_cell_writes_later_is_an_error():
    """As in plain autograd."""

    class Writes(Mixes):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            y = self.mix(h).tanh()
            h = self.step(x, y, None)
            return h + y.add_(x), h

    with pytest.raises(RuntimeError, match="must be those of the forward pass until the backward"):
        World(Writes).decoded(memory_budget=4000).backward()


def test_a_first_call_that_does_more_is_seen_long_after():
    """Although the state has forgotten it at the end of the segment."""

    class Forgets(Begins):
        def step(self, x: Tensor, h: Tensor, before: Any) -> Tensor:
            return 1e-4 * super().step(x, h, before)

    with pytest.raises(RuntimeError, match="must do in its replay"):
        World(Forgets).decoded(memory_budget=4000).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_other_result(dtype):
    """A replay on a GPU may add in another order."""
    rounds = lambda x, again: x * (1 + again * torch.finfo(dtype).eps)  # noqa: E731
    world = World(partial(Unseen, rounds))
    for part in (world.embedding, world.head, world.inner):
        part.to(dtype)
    world.h = world.h.detach().to(dtype)
    world.decoded(memory_budget=4000).backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize("call", ["decode_loss", "chunked_loss"])
def test_a_function_made_inside_of_a_compiled_one(call):
    """The graph breaks at the call, which looks at the function as it is."""
    rnn, head = nn.GRUCell(SIZE, SIZE), nn.Linear(SIZE, VOCABULARY)
    parts = nn.Embedding(VOCABULARY, SIZE), lambda x, h: (rnn(x, h),) * 2, head
    targets, h = torch.zeros(STEPS, BATCH, dtype=torch.long), torch.zeros(BATCH, SIZE)

    def loss() -> Tensor:
        if call == "decode_loss":
            return accumext.decode_loss(*parts, targets, h, feedback="greedy").loss
        x = partial(torch.ones, BATCH, SIZE, requires_grad=True)
        return accumext.chunked_loss(lambda x: head(x).sum(), x(), chunks=2)

    torch.testing.assert_close(torch.compile(loss, backend="eager")(), loss())
