"""Spans of steps, by what they are at most and by where they end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumext.recurrence import cuts


@pytest.mark.parametrize(
    ("rules", "spans"),
    [
        ((), [(2, 9)]),
        ((3,), [(2, 5), (5, 8), (8, 9)]),
        ((3, 2), [(2, 4), (4, 6), (6, 8), (8, 9)]),
        ((range(0, 20, 4),), [(2, 4), (4, 8), (8, 9)]),
        (({7, 3, 2, 9},), [(2, 3), (3, 7), (7, 9)]),
        # a span begins anew where another one ends
        ((3, (6,)), [(2, 5), (5, 6), (6, 9)]),
    ],
)
def test_by_rules(rules, spans):
    assert cuts(2, 9, *rules) == spans


@given(
    st.integers(0, 9), st.integers(0, 40), st.integers(1, 50), st.frozensets(st.integers(-5, 60))
)
def test_every_step_is_in_one_span(begin, steps, longest, at):
    spans = cuts(begin, begin + steps, longest, at)
    assert [t for span in spans for t in range(*span)] == [*range(begin, begin + steps)]
    assert all(0 < last - first <= longest for first, last in spans)
    assert not any(first < step < last for first, last in spans for step in at)
