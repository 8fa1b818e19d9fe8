"""What wrong loops, and right ones that look odd, are listed with."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from audited import Looping
from by_definition import Size


class Wrong(NamedTuple):
    loop: Looping
    id: str
    size: float | Size  # a number, or what the loop by itself shows to be the size
    at: str  # a word of the line that is at fault
    asks: bool  # a question, since it may be meant
    also: tuple[str, ...]  # what else may be said, since it is true
    told: str  # a word of the evidence


def into(listed: list[Wrong]) -> Callable[..., Callable[[Looping], Looping]]:
    """A decorator that puts wrong loops into a list."""

    def wrong(
        id: str,
        size: float | Size,
        at: str = "backward(",
        asks: bool = False,
        also: tuple[str, ...] = (),
        told: str = "",
    ) -> Callable[[Looping], Looping]:
        def of(loop: Looping) -> Looping:
            listed.append(Wrong(loop, id, size, at, asks, also, told))
            return loop

        return of

    return wrong


def seeded_into(listed: list[Looping]) -> Callable[[Looping], Looping]:
    """A decorator that puts loops into a list, which draw the same numbers at every call."""

    def put(loop: Looping) -> Looping:
        @functools.wraps(loop)
        def seeded(*args, **kwargs):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return loop(*args, **kwargs)

        listed.append(seeded)
        return seeded

    return put
