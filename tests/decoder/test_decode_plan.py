"""The decoder's plan against its definition, found by trying every size; without a tensor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from accumext.decoder import _memory
from accumext.decoder._memory import WorkspacePlan, backward_steps, fill_budget

LOGIT_ROWS, SEGMENT = _memory.LOGIT_ROWS, _memory.SEGMENT
CELL_ROWS, AUTOMATIC_ROWS = _memory.CELL_ROWS, _memory.AUTOMATIC_ROWS

steps = st.integers(0, 12)
batches = st.integers(0, 40)
row_bytes = st.integers(1, 9)


@given(steps, batches, row_bytes, row_bytes, st.integers(0, 3000))
def test_a_budget_is_filled(steps: int, batch: int, logits: int, exps: int, budget: int) -> None:
    """As many rows of logits as can have a row of exponentials each, then as many of those as what
    is left holds: whole steps of them, unless not even one fits."""
    fitting = [n for n in range(1, min(batch, LOGIT_ROWS) + 1) if n * (logits + exps) <= budget]
    logit_rows = max(fitting, default=1)
    rows = [n for n in range(1, steps * batch + 1) if logit_rows * logits + n * exps <= budget]
    whole = [n for n in rows if n % batch == 0]
    plan = fill_budget(steps, batch, logits, exps, budget)
    assert plan == WorkspacePlan(max(whole or rows, default=1), logit_rows, SEGMENT)
    least = fill_budget(steps, batch, logits, exps, 0)
    assert (least.rows, least.logit_rows) == (1, 1)
    if budget >= logits + exps:
        assert plan.logit_rows * logits + plan.rows * exps <= budget


@given(st.integers(0, 700), st.integers(0, 700), row_bytes, row_bytes)
def test_without_a_budget_there_are_enough_whole_steps(
    steps: int, batch: int, logits: int, exps: int
) -> None:
    """The fewest steps that have AUTOMATIC_ROWS rows of the memory that logits take."""
    plan = fill_budget(steps, batch, logits, exps, None)
    enough = AUTOMATIC_ROWS * logits // exps
    needed = next(n for n in range(enough + 1) if n * batch >= enough or batch == 0)
    assert plan.rows == max(1, min(needed * batch, steps * batch))
    assert plan.logit_rows == max(1, min(batch, LOGIT_ROWS))
    assert plan.segment == SEGMENT


@given(st.integers(0, 2 * CELL_ROWS))
def test_the_cells_backward_pass_takes_the_fewest_steps_that_are_enough(batch: int) -> None:
    needed = next(n for n in range(1, CELL_ROWS + 1) if n * max(1, batch) >= CELL_ROWS)
    assert backward_steps(batch) == needed


def test_sizes_that_anyone_can_compute() -> None:
    assert fill_budget(1000, 1, 400, 400, None) == WorkspacePlan(256, 1, 16)
    assert fill_budget(100, 16, 400, 400, None) == WorkspacePlan(256, 16, 16)
    assert fill_budget(100, 48, 400, 400, None) == WorkspacePlan(288, 32, 16)
    assert fill_budget(100, 48, 400, 200, None) == WorkspacePlan(
        528, 32, 16
    )  # half the bytes, twice the rows
    assert fill_budget(2, 16, 400, 400, None) == WorkspacePlan(32, 16, 16)
    assert fill_budget(100, 16, 400, 400, 16 * 400 + 40 * 400) == WorkspacePlan(32, 16, 16)
    assert fill_budget(100, 16, 400, 400, 8 * 800) == WorkspacePlan(8, 8, 16)
    assert (backward_steps(16), backward_steps(255), backward_steps(256), backward_steps(1000)) == (
        16,
        2,
        1,
        1,
    )
