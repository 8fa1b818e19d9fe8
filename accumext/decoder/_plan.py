"""The sizes that a call chooses: of the workspace of its head, and of the pieces of its passes."""

from __future__ import annotations

from typing import Any, NamedTuple

from accumext.decoder._model import OP
from accumext.decoder._precision import Dtypes
from accumext.decoder._rnn_weights import RnnWeights
from accumext.tensors.checks import fail_value, positive_int


class HeadRows(NamedTuple):
    """Numbers of rows that go through the head together."""

    # So many that the deferred products run at full speed, in the dtype of logits: with fewer, the
    # traffic of the head's weight and its gradient dominates. Twice as many where exponentials take
    # half as much, and less than twice of that where these would not fill it a second time.
    workspace: int
    logits: int  # of logits that exist at once, where so many are known


# On a CPU, the widest product of few columns that is fast; a GPU wants hundreds of rows.
HEAD_ROWS = {"cpu": HeadRows(256, 32), "cuda": HeadRows(1024, 512)}

# Steps whose cell graph is rebuilt at once in the backward pass of a callable cell. Longer segments
# save little: the states between segments are T/16 of all states.
SEGMENT = 16

# Bytes of the cell's graph that are kept rather than computed again, however small the workspace:
# all of a small decoder's, where steps take longer than their arithmetic. Of a callable cell none
# where memory is bounded.
KEPT_GRAPH = 2**24

PRE_ACTIVATIONS = 4  # of a unit of a GRU or LSTM
HANDED_OUT = ("cpu", "meta")  # where operators write them out; meta: as predicted

# Rows of pre-activations that the backward pass of torch's modules forms at once: on a GPU so many
# that products fill it and launches are few.
CELL_ROWS = {"cpu": 256, "cuda": 2048}


class Plan(NamedTuple):
    """The sizes that one call keeps to."""

    rows: int  # of exponentials in the workspace: a multiple of B where a step fits
    logit_rows: int  # rows of logits at once
    bounded: bool = False  # by the caller, so that no graph is kept
    backward_steps: int = 1  # of torch's modules at once in the backward pass
    # The forward pass forms the head's gradients. They wait for the backward pass where the
    # upstream gradient is per token, and where they are added to a main gradient, which an
    # optimizer offers in the backward pass.
    gradients_in_forward: bool = True
    # Of pre-activations of torch's modules that the forward pass leaves, so that the backward pass
    # need not form them again: where they are no larger than the workspace, or half of a budget.
    pre_activation_bytes: int = 0


def plan_from(
    memory_budget: Any,
    *,
    shape: tuple[int, int],  # (T, B)
    words: int,  # V
    device: str,
    dtypes: Dtypes,
    free_running: bool,
    gradients_in_forward: bool,
    rnn: RnnWeights | None,  # None: the cell is called
) -> Plan:
    """The sizes of a call of this shape, with its memory budget checked."""
    steps, batch = shape
    logit_bytes, exps_bytes = words * dtypes.accumulation.itemsize, words * dtypes.exps.itemsize
    if memory_budget is not None:
        memory_budget = positive_int(OP, "memory_budget", memory_budget)
        if memory_budget < logit_bytes:
            contract = f"hold one row of logits, {logit_bytes} bytes"
            fail_value(OP, "memory_budget", contract, memory_budget)
    wanted = HEAD_ROWS.get(device, HEAD_ROWS["cpu"])
    # known rows of logits at once
    most = batch if free_running and gradients_in_forward else steps * batch
    wanted = HeadRows(wanted.workspace, min(most, wanted.logits))
    kept, budget = 0, memory_budget
    if rnn is not None and rnn.gates > 1 and device in HANDED_OUT:
        units = rnn.layers * PRE_ACTIVATIONS * rnn.units
        kept = steps * batch * units * dtypes.accumulation.itemsize
    if budget is not None:
        kept = kept if logit_bytes <= budget - kept >= budget // 2 else 0
        budget -= kept
    plan = fill_budget(steps, batch, logit_bytes, exps_bytes, budget, wanted)
    workspace = plan.rows * exps_bytes + plan.logit_rows * logit_bytes
    if budget is None and kept > max(KEPT_GRAPH, workspace):
        kept = 0
    bounded, pieces = memory_budget is not None, backward_steps(device, batch)
    if kept > 0:  # of a step, half as much is formed
        pieces *= 2
    return Plan(plan.rows, plan.logit_rows, bounded, pieces, gradients_in_forward, kept)


def fill_budget(
    steps: int, batch: int, logit_bytes: int, exps_bytes: int, memory_budget: int | None,
    wanted: HeadRows,
) -> Plan:  # fmt: skip
    """Fill the memory budget with whole steps, or with as many rows of one step as it holds.

    `logit_bytes` and `exps_bytes` are those of a row [V] of logits and of exponentials.
    """
    logit_rows = max(1, wanted.logits)
    if memory_budget is None:
        # The remainder after so many rows at a time is shared out: a window of few is slow.
        windows = max(1, steps * batch * exps_bytes // (wanted.workspace * logit_bytes))
        rows = -(-steps // windows) * batch
    else:
        logit_rows = max(1, min(logit_rows, memory_budget // (logit_bytes + exps_bytes)))
        rows = (memory_budget - logit_rows * logit_bytes) // exps_bytes
        rows = rows - rows % max(1, batch) or rows
    return Plan(max(1, min(rows, steps * batch)), logit_rows)


def backward_steps(device: str, batch: int) -> int:
    """Steps that the backward pass of torch's modules takes at once: CELL_ROWS rows of them."""
    return -(-CELL_ROWS.get(device, CELL_ROWS["cpu"]) // max(1, batch))


def keeps_graph(steps: int, graph: int, growth: int) -> bool:
    """Tell whether the graph of so many last steps is kept: by the bytes of the first step's, and
    those by which the state has grown since, twice: a cache that is read, and its frozen copy."""
    return steps * (graph + 2 * growth) <= KEPT_GRAPH
