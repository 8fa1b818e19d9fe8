"""Embedding, cell and head that are called keep and draw what they do in a plain loop."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import relative_distance
from support.keeping_cells import EXACT, SIZE, VOCABULARY, Cell, World, hooked
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrizations

pytestmark = pytest.mark.usefixtures("few_steps_are_kept")


class ScaledHead(nn.Linear):
    """A head by the number of its calls."""

    def __init__(self) -> None:
        super().__init__(SIZE, VOCABULARY, dtype=torch.float64)
        self.calls = itertools.count(1)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) * 0.9 ** next(self.calls)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 4000}, {"k1": 7, "k2": 40}], ids=str)
def test_an_iterator_of_a_head_that_is_called_is_no_silent_mistake(options):
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
def test_weights_that_change_when_they_are_read(part, options, trains):
    """A call takes a step of the power iteration; nothing else reads the weight."""
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
