"""The length of segments whose graph the backward pass makes again, and the checkpoints between
them that are kept (Griewank & Walther 2000)."""

from __future__ import annotations

import math
from typing import NamedTuple

SMALLEST = 3  # steps of a segment that is chosen: so many exist while sizes are measured


class Sizes(NamedTuple):
    """Bytes that a step leaves."""

    checkpoint: int  # all that is needed to run from there on: input, state, generators
    state: int  # the state alone
    graph: int


class Plan(NamedTuple):
    """The segments that the backward pass of a call has to run again."""

    length: int  # steps of a segment
    kept: int | None  # checkpoints that are kept at once, beside the first; None: all


def choose_plan(steps: int, sizes: Sizes, length: int | None, budget: int | None) -> Plan | None:
    """The plan with the fewest steps run again within `budget` bytes; None if none fits.

    Without a budget, segments of `length` steps and all checkpoints; without that either, segments
    as long as the memory of twice the states of all steps and the graph of sqrt(steps) allows: the
    last one, whose graph is kept from the forward pass, is not run again.
    """
    if budget is None and length is not None:
        return Plan(length, None)
    root = math.isqrt(steps)
    if budget is None:  # small states leave room for the checkpoints and a segment all the same
        checkpoints = max(2 * steps * sizes.state, (root + 3) * sizes.checkpoint)
        budget = checkpoints + max(SMALLEST, root) * sizes.graph
    if length is not None:
        lengths = {length}
    else:  # even shares, what is left by so many checkpoints, and the short ones
        counts = range(1, root + 2)
        lengths = {-(-steps // count) for count in counts}
        lengths |= {(budget - count * sizes.checkpoint) // max(1, sizes.graph) for count in counts}
        lengths = {max(SMALLEST, min(n, steps)) for n in lengths | set(range(root + 2))}
    plans = {}
    for segment in lengths:
        again = -(-steps // segment) - 1  # segments that run again: all but the last
        # Beside the graph of a segment there is the checkpoint that it starts from.
        room = budget - min(segment, steps) * sizes.graph
        kept = min(room // max(1, sizes.checkpoint) - 1, max(0, again - 1))
        if kept >= 0:
            plan = Plan(segment, None if kept >= again - 1 else kept)
            plans[plan] = segment * advances(again, kept) + steps - min(segment, steps)
    return min(plans, key=lambda plan: (plans[plan], plan.length), default=None)


def least_budget(steps: int, sizes: Sizes, length: int | None) -> int:
    """The bytes below which there is no plan."""
    return min(length or SMALLEST, steps) * sizes.graph + sizes.checkpoint


def advances(count: int, kept: int) -> int:
    """Segments to run again to reach the begin of each of `count`, last one first, where the first
    pass has kept `kept_at_first`."""
    if count <= 1:
        return 0
    places, sweeps = kept + 1, _sweeps(count, kept + 1)
    all_sweeps = sweeps * count - math.comb(places + sweeps, places + 1)
    return all_sweeps - max(kept_at_first(count, kept), default=0)


def kept_at_first(count: int, kept: int) -> list[int]:
    """The segments, of `count`, before which the first pass keeps checkpoints, beside the first."""
    found, at = [], 0
    for room in range(kept, 0, -1):
        if count - at > 1:
            at += split(count - at, room)
            found.append(at)
    return found


def split(count: int, kept: int) -> int:
    """The number of `count` segments before the next checkpoint that is kept, where there is room
    for `kept`; `count - 1` if there is none."""
    if kept == 0:
        return count - 1
    places, sweeps = kept + 1, _sweeps(count, kept + 1)
    longest = math.comb(places + sweeps - 1, places)  # that one sweep fewer can reverse
    return min(longest, count - math.comb(places + sweeps - 2, places - 1))


def _sweeps(count: int, places: int) -> int:
    """The number of times that a segment is run at most: the least r with
    binomial(places + r, places) >= count."""
    sweeps = 0
    while math.comb(places + sweeps, places) < count:
        sweeps += 1
    return sweeps
