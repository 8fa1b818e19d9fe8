"""What cells keep from one call to the next, against plain autograd.

Gradients, and what the cell has kept afterwards, are those of the plain loop, where steps run again
in the backward pass, too.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import relative_distance
from support.keeping_cells import (
    DECODED,
    EXACT,
    KINDS,
    ROLLOUTS,
    SIZE,
    STEPS,
    WAYS,
    AllocatesAgain,
    Attribute,
    Buffers,
    Mixes,
    World,
    in_windows,
    plain,
    ways,
)
from support.tensors import assert_equal
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import accumext
from accumext.recurrence import KeptState

pytestmark = pytest.mark.usefixtures("few_steps_are_kept")


# Each kind in both ways, and each option with some kinds: all look at a cell with the same code.
# A rollout without options keeps its graph.
IN_BOTH_WAYS = [
    (kind, *case)
    for index, kind in enumerate(KINDS)
    for case in (
        WAYS[index % len(DECODED)],
        WAYS[len(DECODED) + index % len(ROLLOUTS)],
        ("rollout", {}),
    )
]


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
    assert_equal(cell.seen, seen)
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


@pytest.mark.parametrize("k1", [7, STEPS])
@pytest.mark.parametrize("kind", ["attribute", "buffers", "generators"])
def test_windows_of_tbptt_that_all_begin_with_the_first_step(kind, k1):
    """Together they are the plain loop, for the initial state, too."""
    found = in_windows(World(kind), "tbptt", k1, STEPS)
    expected = World(kind)
    exact = expected.gradients(expected.plain(greedy=True))
    assert relative_distance(found[:1], exact[:1]) < EXACT
    assert relative_distance(found, exact) < EXACT


def test_a_tensor_that_lies_where_an_earlier_one_did():
    """It is watched, too: else a window would find in it what later steps have written."""
    in_windows(World(AllocatesAgain), "tbptt", 1, 4)


KEEPS_GRAPH = (
    "must keep no tensor with a graph from one call to the next if k1 < k2, got one of shape "
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


def test_a_first_call_that_does_more_is_seen_long_after():
    """Although the state has forgotten it at the end of the segment."""

    class Forgets(Begins):
        def step(self, x: Tensor, h: Tensor, before: Any) -> Tensor:
            return 1e-4 * super().step(x, h, before)

    with pytest.raises(RuntimeError, match="must do in its replay"):
        World(Forgets).decoded(memory_budget=4000).backward()
