"""The length of the segments that the backward pass runs again, and which checkpoints between them
are kept (Griewank & Walther 2000)."""

from __future__ import annotations

import math
from typing import NamedTuple

SMALLEST = 3  # least steps of a chosen segment: so many run as one while sizes are measured


class Sizes(NamedTuple):
    """Bytes of a step's results."""

    checkpoint: int  # everything needed to run the next steps: input, state, generators
    state: int  # the state alone
    graph: int


class Plan(NamedTuple):
    """The segments that the backward pass of a call runs again."""

    length: int  # steps of a segment
    kept: int | None  # checkpoints that are kept at once, not counting the first; None: all


def choose_plan(steps: int, sizes: Sizes, length: int | None, budget: int | None) -> Plan | None:
    """Return the plan that runs the fewest steps again within `budget` bytes; None if none fits.

    The last segment does not run again, for its graph is kept from the forward pass. Without a
    budget, segments have `length` steps, and all checkpoints are kept. Without a length either, the
    budget is twice the memory of all states, and the graph of sqrt(steps) steps.
    """
    if budget is None and length is not None:
        return Plan(length, None)
    root = math.isqrt(steps)
    if budget is None:  # even for small states, enough for sqrt(steps) checkpoints and a segment
        checkpoints = max(2 * steps * sizes.state, (root + 3) * sizes.checkpoint)
        budget = checkpoints + max(SMALLEST, root) * sizes.graph
    if length is not None:
        lengths = {length}
    else:  # equal segments, the longest that leave room for so many checkpoints, and short ones
        counts = range(1, root + 2)
        lengths = {-(-steps // count) for count in counts}
        lengths |= {(budget - count * sizes.checkpoint) // max(1, sizes.graph) for count in counts}
        lengths = {max(SMALLEST, min(n, steps)) for n in lengths | set(range(root + 2))}
    plans = {}
    for segment in lengths:
        again = -(-steps // segment) - 1  # segments that run again: all but the last
        # A segment needs memory for its graph and for the checkpoint from which it starts.
        room = budget - min(segment, steps) * sizes.graph
        kept = min(room // max(1, sizes.checkpoint) - 1, max(0, again - 1))
        if kept >= 0:
            plan = Plan(segment, None if kept >= again - 1 else kept)
            plans[plan] = segment * advances(again, kept) + steps - min(segment, steps)
    return min(plans, key=lambda plan: (plans[plan], plan.length), default=None)


def least_budget(steps: int, sizes: Sizes, length: int | None) -> int:
    """Return the bytes of the smallest budget for which there is a plan."""
    return min(length or SMALLEST, steps) * sizes.graph + sizes.checkpoint


def advances(count: int, kept: int) -> int:
    """Return how many segments run again to reach the beginning of each of `count` segments, from
    the last to the first, if the first pass has kept the checkpoints `kept_at_first`."""
    if count <= 1:
        return 0
    places, sweeps = kept + 1, _sweeps(count, kept + 1)
    all_sweeps = sweeps * count - math.comb(places + sweeps, places + 1)
    return all_sweeps - max(kept_at_first(count, kept), default=0)


def kept_at_first(count: int, kept: int) -> list[int]:
    """Return the segments after the first before which the first pass keeps checkpoints."""
    segments, at = [], 0
    for room in range(kept, 0, -1):
        if count - at > 1:
            at += split(count - at, room)
            segments.append(at)
    return segments


def split(count: int, kept: int) -> int:
    """Return how many of `count` segments lie before the next kept checkpoint, if there is room for
    `kept` checkpoints; `count - 1` if there is none."""
    if kept == 0:
        return count - 1
    places, sweeps = kept + 1, _sweeps(count, kept + 1)
    longest = math.comb(places + sweeps - 1, places)  # segments that `sweeps - 1` can reverse
    return min(longest, count - math.comb(places + sweeps - 2, places - 1))


def _sweeps(count: int, places: int) -> int:
    """Return the largest number of times that a segment runs: the least r with
    binomial(places + r, places) >= count."""
    sweeps = 0
    while math.comb(places + sweeps, places) < count:
        sweeps += 1
    return sweeps
