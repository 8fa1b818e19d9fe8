"""The division of steps into spans."""

from __future__ import annotations

from collections.abc import Iterable


def cuts(begin: int, end: int, *rules: int | Iterable[int]) -> list[tuple[int, int]]:
    """[begin, end) in spans. A number as a rule says how long each is at most; steps, such as
    range(0, T, k1), say where one ends."""
    longest, stops = end - begin, {end}
    for rule in rules:
        if isinstance(rule, int):
            longest = min(longest, rule)
        else:
            stops.update(rule)
    spans = []
    for stop in sorted(stops):
        while begin < min(stop, end):
            until = min(begin + longest, stop, end)
            spans.append((begin, until))
            begin = until
    return spans
