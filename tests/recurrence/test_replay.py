"""Steps that run again in the backward pass do what they did in the forward pass; else it is an
error."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.decode_oracle import relative_distance
from support.keeping_cells import EXACT, SIZE, STEPS, Mixes, World, in_windows, plain, ways
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.usefixtures("few_steps_are_kept")


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
    text = f"^{op}: {name} must take no gradients inside of itself if steps run again, got "
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
        exact = expected.gradients(expected.plain(greedy=True))
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_other_result(dtype):
    """A replay on a GPU may add in another order."""
    rounds = lambda x, again: x * (1 + again * torch.finfo(dtype).eps)  # noqa: E731
    world = World(partial(Unseen, rounds))
    for part in (world.embedding, world.head, world.inner):
        part.to(dtype)
    world.h = world.h.detach().to(dtype)
    world.decoded(memory_budget=4000).backward()


def test_a_last_window_of_a_rollout_that_does_something_else_is_an_error():
    """Whose graph is kept, so that nothing runs again."""
    world = World(partial(Unseen, lambda x, again: x))
    calls = itertools.count(1)
    world.inner.function = lambda x, again: x * 3 if next(calls) == STEPS else x
    with pytest.raises(RuntimeError, match="must do in its replay"):
        world.rollout(k1=STEPS - 1, k2=STEPS, checkpoint=STEPS)
