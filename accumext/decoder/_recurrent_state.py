"""Recurrent states of any nesting (tuples, lists, dicts): detach them, freeze rows of them; and the
random generators, whose draws a replay of steps must repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accumext._checks import fail_type, fail_value, type_name
from accumext._torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten

State: TypeAlias = Any  # a tensor, None, or any nesting of tuples, lists and dicts of them


def tensors(state: State) -> list[Tensor]:
    """The tensors of a state, in order."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def check_nesting(op: str, name: str, state: State) -> None:
    """Raise for a container that pytree does not know: its tensors would be neither detached nor
    frozen."""
    for leaf in tree_leaves(state):
        if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
            contract = "nest tensors in tuples, lists and dicts"
            fail_type(op, name, contract, type_name(leaf))


def copy_nesting(state: State) -> State:
    """The same tensors in new containers, which a cell may write into."""
    return tree_map(lambda leaf: leaf, state)


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The same nesting with `function` applied to every tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, state)


def detach(state: State) -> State:
    """The same values in the same nesting, without a graph."""
    return map_tensors(Tensor.detach, state)


def freeze(op: str, live: Tensor, new: State, old: State, batch_dim: int) -> State:
    """`new` in the rows where `live` [B] is true, `old` in the others."""

    def choose(new_leaf: Any, old_leaf: Any) -> Any:
        if not isinstance(new_leaf, Tensor) or not isinstance(old_leaf, Tensor):
            return new_leaf
        if new_leaf.dim() == 0:  # of the whole batch, such as a counter
            return new_leaf
        if new_leaf.dim() <= batch_dim or new_leaf.shape[batch_dim] != live.shape[0]:
            contract = f"hold tensors with the batch in dimension {batch_dim} to be frozen by row"
            fail_value(op, "state", contract, f"shape {list(new_leaf.shape)}")
        shape = [-1 if dim == batch_dim else 1 for dim in range(new_leaf.dim())]
        return torch.where(live.view(shape), new_leaf, old_leaf)

    if old is None:  # the first step of a cell that makes its own initial state
        return new
    leaves, nesting = tree_flatten(new)
    before = tree_leaves(old)
    if len(leaves) != len(before):
        contract = f"return a state with the {len(before)} entries of the one before"
        fail_value(op, "cell", contract, len(leaves))
    return tree_unflatten([choose(n, o) for n, o in zip(leaves, before, strict=True)], nesting)


def zero_gradient_tie(given: list[Tensor]) -> Tensor | None:
    """A 0 that depends on every given tensor, whose backward gives each a zero gradient."""
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
def replay_rng(state: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Repeat the draws that followed `rng_state`, then restore the generators; None: do nothing."""
    enabled, devices = state is not None, [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled):
        if state is not None:
            set_rng_state(state, device)
        yield


def own_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The given generator, or one seeded from the global CPU generator in place of a global one.

    Tokens are drawn from it rather than from the global one, so that a replay of the cell's dropout
    need not draw them again.
    """
    global_generators = (torch.default_generator, *torch.cuda.default_generators)
    if generator is not None and not any(generator is g for g in global_generators):
        return generator
    seed = int(torch.randint(2**62, ()))
    return torch.Generator(device).manual_seed(seed)
