"""The cases of a large parametrized test that run by default.

Faults mostly depend on one setting or on two together, so of a test with more than LARGEST cases
those run by default that between them hold every pair of values; the others get the marker `full`.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest

LARGEST = 100
MARKER = "full: a case of a large test beyond those that hold every pair of values"

Row = tuple[int, ...]  # of one case: which value of each axis


def covering(rows: Sequence[Row]) -> set[int]:
    """Indices of few rows that hold every pair of values that any of the rows holds.

    Rows of one or two axes are all pairs of their own: there, every value once. Each choice is the
    first of the rows that hold most of what is missing, so it is the same in every process.
    """
    columns = [[column.index(value) for value in column] for column in zip(*rows)]
    axes = set(map(tuple, columns))  # names that change together, by one decorator, are one axis
    together = 2 if len(axes) > 2 else 1
    held = [set(itertools.combinations(enumerate(row), together)) for row in zip(*axes)]
    missing, chosen = set().union(*held), set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(held[index] & missing))
        missing -= held[best]
        chosen.add(best)
    return chosen


def is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Give the marker `full` to cases of large tests that do not run by default."""
    tests = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not is_skipped(item):
            tests[item.path, item.cls, item.originalname].append(item)
    for cases in tests.values():
        if len(cases) > LARGEST:
            # Cases share the objects that their decorators list, which need not compare.
            kept = covering([tuple(map(id, case.callspec.params.values())) for case in cases])
            for index, case in enumerate(cases):
                if index not in kept:
                    case.add_marker(pytest.mark.full)
