"""Where borders are kept: the fewest steps run again, against every other way to keep them."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumext.loops._checkpoint_plan import (
    SMALLEST,
    Plan,
    Sizes,
    advances,
    choose_plan,
    kept_at_first,
    least_budget,
    split,
)


@functools.cache
def best(count: int, kept: int) -> int:
    """Segments passed over to reverse `count`, in the best of all ways; the first pass included."""
    if count <= 1:
        return 0
    if kept == 0:
        return count * (count - 1) // 2
    return min(m + best(count - m, kept - 1) + best(m, kept) for m in range(1, count))


def followed(count: int, kept: int) -> int:
    """The same, by `split`."""
    if count <= 1:
        return 0
    if kept == 0:
        assert split(count, kept) == count - 1
        return count * (count - 1) // 2
    m = split(count, kept)
    assert 1 <= m < count
    return m + followed(count - m, kept - 1) + followed(m, kept)


@pytest.mark.parametrize("kept", range(7))
def test_splits_are_optimal(kept):
    for count in range(1, 50):
        assert followed(count, kept) == best(count, kept)
        found = kept_at_first(count, kept)
        assert len(found) == min(kept, count - 1)
        assert advances(count, kept) == best(count, kept) - max(found, default=0)


@given(
    st.integers(1, 60), st.integers(1, 50), st.integers(1, 50), st.none() | st.integers(1, 70),
    st.none() | st.integers(1, 4000),
)  # fmt: skip
def test_a_plan_is_the_cheapest_that_fits(steps, border, graph, length, budget):
    sizes = Sizes(border, border, graph)
    plan = choose_plan(steps, sizes, length, budget)
    if budget is None:
        assert plan is not None
        assert plan.kept is None
        assert length is None or plan.length == length
        return

    def cost(plan: Plan) -> int | None:
        """Steps run again, None if the plan does not fit."""
        again = -(-steps // plan.length) - 1
        kept = max(0, again - 1) if plan.kept is None else plan.kept
        if (kept + 1) * border + min(plan.length, steps) * graph > budget:
            return None
        return plan.length * advances(again, kept) + steps - min(plan.length, steps)

    lengths = [length] if length is not None else range(SMALLEST, max(SMALLEST, steps) + 1)
    costs = [cost(Plan(n, k)) for n in lengths for k in (None, *range(steps))]
    fitting = [c for c in costs if c is not None]
    assert (plan is None) == (not fitting) == (budget < least_budget(steps, sizes, length))
    if plan is not None:
        chosen = cost(plan)
        assert chosen is not None
        # some lengths are not tried: those between shares of the steps
        assert chosen <= 1.3 * min(fitting) + 3


def test_without_a_budget_the_memory_is_that_of_states():
    plan = choose_plan(256, Sizes(60, 30, 300), None, None)
    assert plan == Plan(length=(2 * 256 * 30 + 16 * 300 - 4 * 60) // 300, kept=None)
    assert choose_plan(256, Sizes(60, 0, 300), None, None) == Plan(16, None)
