"""Recurrent state of any nesting (tuples, lists, dicts): cut it, freeze rows of it, replay the
randomness around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from accumext._checks import fail_type, fail_value, type_name

State: TypeAlias = Any  # a tensor, None, or any nesting of tuples, lists and dicts of them


def tensors(state: State) -> list[Tensor]:
    """The tensors of a state, in order."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def check_nesting(op: str, name: str, state: State) -> None:
    """Raise for a container that cannot be looked into: cutting and freezing would pass it by."""
    for leaf in tree_leaves(state):
        if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
            contract = "nest tensors in tuples, lists and dicts"
            fail_type(op, name, contract, type_name(leaf))


def fresh(state: State) -> State:
    """The same tensors in a nesting of its own, which a cell may write into."""
    return tree_map(lambda leaf: leaf, state)


def zeros_on(device: torch.device, state: State) -> State:
    """The same nesting; tensors that are elsewhere (on meta) are zeros on `device`."""

    def move(leaf: Any) -> Any:
        elsewhere = isinstance(leaf, Tensor) and leaf.device != device
        return torch.zeros_like(leaf, device=device) if elsewhere else leaf

    return tree_map(move, state)


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The same nesting with `function` of every tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, state)


def detach(state: State) -> State:
    """The same values in the same nesting, cut from their graph."""
    return map_tensors(Tensor.detach, state)


def freeze(op: str, active: Tensor, new: State, old: State, batch_dim: int) -> State:
    """`new` in the rows where `active` [B] is true, `old` in the others."""

    def choose(new_leaf: Any, old_leaf: Any) -> Any:
        if not isinstance(new_leaf, Tensor) or not isinstance(old_leaf, Tensor):
            return new_leaf
        if new_leaf.dim() == 0:  # of the whole batch, such as a counter
            return new_leaf
        if new_leaf.dim() <= batch_dim or new_leaf.shape[batch_dim] != active.shape[0]:
            contract = f"hold tensors with the batch in dimension {batch_dim} to be frozen by row"
            fail_value(op, "state", contract, f"shape {list(new_leaf.shape)}")
        shape = [1] * new_leaf.dim()
        shape[batch_dim] = -1
        return torch.where(active.view(shape), new_leaf, old_leaf)

    if old is None:  # the first step of a cell that makes its own initial state
        return new
    leaves, nesting = tree_flatten(new)
    before = tree_leaves(old)
    if len(leaves) != len(before):
        contract = f"return a state with the {len(before)} entries of the one before"
        fail_value(op, "cell", contract, len(leaves))
    return tree_unflatten([choose(n, o) for n, o in zip(leaves, before, strict=True)], nesting)


def zero_gradient_tie(given: list[Tensor]) -> Tensor | None:
    """A sum that is exactly 0 and gives every tensor a zero gradient, whatever its values."""
    ties = [t.reshape(-1)[:0].sum() for t in given if t.requires_grad]
    return torch.stack([t.to(ties[0].dtype) for t in ties]).sum() if ties else None


def rng_state(device: torch.device) -> tuple[Tensor, ...]:
    """The generators that dropout on `device` draws from."""
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


def set_rng_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    """Put the generators back to where `rng_state` found them."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def replaying(state: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Draw again what was drawn after `state` was taken, then go on from here (`None`: do
    nothing)."""
    if state is None:
        yield
        return
    now = rng_state(device)
    set_rng_state(state, device)
    try:
        yield
    finally:
        set_rng_state(now, device)


def own_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The given generator, or one seeded from the global CPU generator in place of a global one.

    Tokens are drawn from it rather than from the global one, so that a replay of the cell's dropout
    need not draw them again.
    """
    everyones = (torch.default_generator, *torch.cuda.default_generators)
    if generator is not None and not any(generator is one for one in everyones):
        return generator
    seed = int(torch.randint(2**62, ()))
    return torch.Generator(device).manual_seed(seed)
