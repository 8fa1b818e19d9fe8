"""The division of steps into spans."""

from __future__ import annotations

from collections.abc import Iterable


def cuts(begin: int, end: int, *rules: int | Iterable[int]) -> list[tuple[int, int]]:
    """Divide [begin, end) into spans. A rule that is a number is the greatest length of a span; a
    rule of several steps, such as range(0, T, k1), lists where spans end."""
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
