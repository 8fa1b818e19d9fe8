"""What wrong loops, and right ones that may look odd, are listed with."""

from collections.abc import Callable
from typing import NamedTuple

from audited import Looping
from by_definition import Size

BOTH = ("optimizer", "model")


class Right(NamedTuple):
    loop: Looping
    asked: set[str]  # questions, since what is right may look like what is meant otherwise
    told: tuple[str, ...]  # what an audit is told: model and "optimizer", or the "model" alone


class Wrong(NamedTuple):
    loop: Looping
    id: str
    size: float | Size  # a number, or what the loop by itself shows to be the size
    at: str  # a word of the line that is at fault
    asks: bool  # a question, since it may be meant
    also: tuple[str, ...]  # what else may be said, since it is true
    told: str  # a word of the evidence


RIGHT: list[Right] = []
WRONG: list[Wrong] = []


def right(*asked: str, told: tuple[str, ...] = ("optimizer",)) -> Callable[[Looping], Looping]:
    """A decorator that lists a right loop."""

    def of(loop: Looping) -> Looping:
        RIGHT.append(Right(loop, set(asked), told))
        return loop

    return of


def wrong(
    id: str,
    size: float | Size,
    at: str = "backward(",
    asks: bool = False,
    also: tuple[str, ...] = (),
    told: str = "",
) -> Callable[[Looping], Looping]:
    """A decorator that lists a wrong loop."""

    def of(loop: Looping) -> Looping:
        WRONG.append(Wrong(loop, id, size, at, asks, also, told))
        return loop

    return of
