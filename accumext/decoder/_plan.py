"""How much a decode keeps alive: rows of the workspace, steps of the cell's backward pass, the peak
that follows."""

from __future__ import annotations

from dataclasses import dataclass

# Rows that make the deferred products run at full speed: fewer would read the head's weight and its
# gradient more often than they compute with them. Twice as many where they take half the memory.
AUTOMATIC_ROWS = 256

# Rows of logits that exist at once, where a step has more: what the skinny product takes in its
# stride.
COLUMNS = 32

# Steps whose cell graph is rebuilt at once in the backward pass of a callable cell. Longer saves
# little: the states at the borders of the segments are T/16 of them.
SEGMENT = 16

# Rows of pre-activations, and of their gradients, that the backward pass of one of torch's cells
# forms at once: enough for its products.
CELL_ROWS = 256


def cell_steps(batch: int) -> int:
    """Steps that CELL_ROWS come to."""
    return -(-CELL_ROWS // max(1, batch))


@dataclass(frozen=True)
class Plan:
    """The sizes a run keeps to."""

    rows: int  # of exponentials in the workspace: a multiple of B where a step fits
    columns: int  # rows of logits at once
    segment: int  # steps of a callable cell's graph at once


def make_plan(
    steps: int, batch: int, logit_bytes: int, exps_bytes: int, memory_budget: int | None
) -> Plan:
    """Fill the memory budget with whole steps, or with as many rows of one step as it holds.

    `logit_bytes` and `exps_bytes` are those of a row [V] of logits and of exponentials.
    """
    columns = max(1, min(batch, COLUMNS))
    if memory_budget is None:
        wanted = AUTOMATIC_ROWS * logit_bytes // exps_bytes
        rows = -(-wanted // max(1, batch)) * batch
    else:
        columns = max(1, min(columns, memory_budget // (logit_bytes + exps_bytes)))
        rows = (memory_budget - columns * logit_bytes) // exps_bytes
        if rows >= batch > 0:
            rows -= rows % batch
    return Plan(max(1, min(rows, steps * batch)), columns, SEGMENT)
