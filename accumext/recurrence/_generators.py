"""Random generators, whose draws a replay of steps must repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def rng_state(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of the generators that dropout on `device` draws from."""
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


def set_rng_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    """Set the generators to the states that `rng_state` returned."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def replay_rng(state: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Repeat the draws after `rng_state` in this context, then restore the generators. None: do
    nothing."""
    enabled, devices = state is not None, [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled):
        if state is not None:
            set_rng_state(state, device)
        yield


def own_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return the generator, or, if it is None or global, one seeded from the global CPU generator.

    Dropout draws from the global generators. Tokens do not, so that a replay of dropout need not
    draw tokens again.
    """
    global_generators = (torch.default_generator, *torch.cuda.default_generators)
    if generator is not None and not any(generator is g for g in global_generators):
        return generator
    seed = int(torch.randint(2**62, (), device="cpu"))
    return torch.Generator(device).manual_seed(seed)
