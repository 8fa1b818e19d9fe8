"""Recurrent state of any nesting (tuples, lists, dicts): cut it, freeze rows of it, replay the
randomness around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from accumext._checks import fail_value

State: TypeAlias = Any  # a tensor, None, or any nesting of tuples, lists and dicts of them


def tensors(state: State) -> list[Tensor]:
    """The tensors of a state, in order."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def detach(state: State) -> State:
    """The same values in the same nesting, cut from their graph."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, state)


def freeze(op: str, active: Tensor, new: State, old: State, batch_dim: int) -> State:
    """`new` in the rows where `active` [B] is true, `old` in the others."""

    def choose(new_leaf: Any, old_leaf: Any) -> Any:
        if not isinstance(new_leaf, Tensor) or not isinstance(old_leaf, Tensor):
            return new_leaf
        if new_leaf.dim() <= batch_dim or new_leaf.shape[batch_dim] != active.shape[0]:
            contract = f"hold tensors with the batch in dimension {batch_dim} to be frozen by row"
            fail_value(op, "state", contract, f"shape {list(new_leaf.shape)}")
        shape = [1] * new_leaf.dim()
        shape[batch_dim] = -1
        return torch.where(active.view(shape), new_leaf, old_leaf)

    if old is None:  # the first step of a cell that makes its own initial state
        return new
    return tree_map(choose, new, old)


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
    """The given generator, or one seeded from the global CPU generator.

    Tokens are drawn from it rather than from the global one, so that a replay of the cell's dropout
    need not draw them again.
    """
    if generator is not None:
        return generator
    seed = int(torch.randint(2**62, ()))
    return torch.Generator(device).manual_seed(seed)
