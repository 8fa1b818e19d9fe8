"""k1 and k2: which steps' losses flow back together, and how far. docs/decoder.md has the
definition."""

from __future__ import annotations

from typing import Any

from accumext._checks import TRUNCATIONS, fail_value, one_of, positive_int


def windows(steps: int, k1: int, k2: int) -> list[tuple[int, int, int]]:
    """(begin, counting, end): the losses of steps [counting, end) flow back to step `begin`.

    A window ends at every multiple of k1 and after the last step. Its losses are those since the
    end before it. They flow back k2 steps from its end, or with k1 = k2 to the first of them, also
    in a last window of fewer steps.
    """
    ends = [*range(k1, steps, k1), steps]
    return [
        (counting if k1 == k2 else max(0, end - k2), counting, end)
        for counting, end in zip([0, *ends], ends, strict=False)
    ]


def truncation_of(op: str, k1: Any, k2: Any, truncation: Any) -> tuple[int | None, int | None]:
    """The arguments k1 and k2, checked; of random cuts k2 alone."""
    one_of(op, "truncation", truncation, TRUNCATIONS)
    k1 = None if k1 is None else positive_int(op, "k1", k1)
    k2 = None if k2 is None else positive_int(op, "k2", k2)
    if truncation == "random":
        if k1 is not None:
            fail_value(op, "k1", "be None where cuts are random", k1)
        if k2 is None or k2 < 2:
            fail_value(op, "k2", "be at least 2, the mean of steps between random cuts", k2)
        return None, k2
    if k2 is None:
        return k1, None
    k1 = k2 if k1 is None else k1
    if k2 < k1:
        fail_value(op, "k2", "be at least k1", f"k1={k1}, k2={k2}")
    return k1, k2


def unused_k1(k1: int) -> str:
    """What a warning says of k1 without k2."""
    return (
        f"k1={k1} has no effect without k2: the gradient flows all the way back. "
        f"Pass k2={k1} to truncate it, or leave k1 out"
    )
