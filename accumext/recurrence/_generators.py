"""Random generators, whose draws a replay of steps must repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
    seed = int(torch.randint(2**62, (), device="cpu"))
    return torch.Generator(device).manual_seed(seed)
