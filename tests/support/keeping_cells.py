"""Cells that keep state of their own, in every way there is, and their losses: in a plain loop, in
`decode_loss`, `rollout` and `tbptt`."""

import random
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import accumext
from support.decode_oracle import plain_losses

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
    walk = Attribute.forward


class Counting(nn.Linear):
    """One of torch's modules, whose __call__ does more."""

    calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return 0.9**self.calls * super().__call__(*args)


def around_linear(change: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    """Change one of torch's modules in the cell."""

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
    """Register a hook that uses a module that only it knows, and random numbers."""
    norm, calls = nn.BatchNorm1d(SIZE, dtype=torch.float64), []

    def hook(module: nn.Module, *given: Any) -> Any:
        tensor = given[0][0] if register == "register_forward_pre_hook" else given[-1]
        if module is norm or tensor.shape[-1] != SIZE:
            return None
        calls.append(len(calls))
        return F.dropout(norm(tensor), 0.3) * 0.9 ** len(calls)

    return getattr(module, register)(hook), norm


def closure() -> Any:
    """Keep variables of a closure: one that is assigned, an object, a helper with its own."""
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
    """Keep a variable of a closure that only the first call gives a value."""
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

    def step(self, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        output, h = self.cell(self.embedding(token), h)
        return self.head(output), h

    def plain(self, greedy: bool = False) -> Tensor:
        return torch.stack([*plain_losses(self.step, self.targets, self.h, greedy)]).mean()

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
        """Return what another call makes of what the cell has kept, and its buffers."""
        with torch.no_grad():
            x = torch.ones(BATCH, SIZE, dtype=torch.float64)
            return [*self.cell(x, x), *self.inner.buffers()]

    def gradients(self, loss: Tensor, **options: Any) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.leaves, materialize_grads=True, **options))


DECODED: list[dict[str, Any]] = [{}, {"memory_budget": 4000}, {"lengths": [STEPS] * BATCH}]
ROLLOUTS = [{"checkpoint": 4}, {"checkpoint": 1}, {"checkpoint": 7}, {"memory_budget": 60000}]
WAYS = [("decoded", o) for o in DECODED] + [("rollout", o) for o in ROLLOUTS]
ways = pytest.mark.parametrize(("way", "options"), WAYS, ids=str)


def plain(kind: Any, way: str) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return loss, gradients, and what is kept afterwards."""
    world = World(kind)
    loss = world.plain() if way == "decoded" else world.plain_rollout()
    return loss, world.gradients(loss), world.after()


def in_windows(world: World, way: str, k1: int, k2: int) -> list[Tensor]:
    if way != "tbptt":
        return world.gradients(getattr(world, way)(k1=k1, k2=k2))
    options = {"criterion": F.cross_entropy, "k1": k1, "k2": k2}
    accumext.tbptt(world.step, world.targets, world.h, **options)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in world.leaves]
