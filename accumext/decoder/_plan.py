"""The sizes that a call chooses: rows of the head's workspace, and steps computed at once."""

from __future__ import annotations

from typing import Any, NamedTuple

from accumext.decoder._model import OP
from accumext.decoder._precision import Dtypes
from accumext.decoder._rnn_weights import RnnWeights
from accumext.tensors.checks import fail_value, positive_int


class HeadRows(NamedTuple):
    """Numbers of rows that go through the head together."""

    # Rows of the workspace, if exponentials have the dtype of logits: enough for the deferred
    # products to run at full speed, for with fewer rows the traffic of the head's weight and its
    # gradient dominates. It is twice as many if exponentials take half the memory, and up to twice
    # that if the remaining rows would not fill a second workspace.
    workspace: int
    logits: int  # of logits that exist at once, if so many hidden states are known


# On a CPU, products with few columns, one per row of logits, are fast up to 32 of them. A GPU needs
# hundreds.
HEAD_ROWS = {"cpu": HeadRows(256, 32), "cuda": HeadRows(1024, 512)}

# Steps of a callable cell that run again together in the backward pass. Longer segments save
# little: the states between segments are T/16 of all states.
SEGMENT = 16

# Bytes of the cell's graph that are kept rather than computed again, however small the workspace:
# enough for all of a small decoder, whose steps are slow for reasons other than arithmetic. For a
# callable cell nothing is kept if the caller bounds memory.
KEPT_GRAPH = 2**24

PRE_ACTIVATIONS = 4  # per unit of a GRU or LSTM
PRE_ACTIVATION_DEVICES = ("cpu", "meta")  # whose operators write them; meta predicts for a CPU

# Rows of pre-activations that the backward pass of torch's modules forms at once: on a GPU enough
# for products to use all of it, in few launches.
CELL_ROWS = {"cpu": 256, "cuda": 2048}


class Plan(NamedTuple):
    """The sizes that one call keeps to."""

    rows: int  # of exponentials in the workspace: a multiple of B if all rows of a step fit
    logit_rows: int  # rows of logits that exist at once
    bounded: bool = False  # the caller gave a budget: no graph of a callable cell is kept
    backward_steps: int = 1  # of torch's modules, computed at once in the backward pass
    # Whether the forward pass forms the head's gradients. It cannot if the upstream gradient is per
    # token, or if they are added to a main gradient, which an optimizer offers in the backward
    # pass.
    gradients_in_forward: bool = True
    # Bytes of pre-activations of torch's modules that the forward pass keeps, so that the backward
    # pass need not form them again: 0 if they are larger than the workspace, or half of a budget.
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
    rnn: RnnWeights | None,  # None: torch runs the cell, which is called
) -> Plan:
    """Check the memory budget, and return the sizes of a call of this shape."""
    steps, batch = shape
    logit_bytes, exps_bytes = words * dtypes.accumulation.itemsize, words * dtypes.exps.itemsize
    if memory_budget is not None:
        memory_budget = positive_int(OP, "memory_budget", memory_budget)
        if memory_budget < logit_bytes:
            contract = f"hold one row of logits, {logit_bytes} bytes"
            fail_value(OP, "memory_budget", contract, memory_budget)
    wanted = HEAD_ROWS.get(device, HEAD_ROWS["cpu"])
    # Hidden states that can be known at once.
    most = batch if free_running and gradients_in_forward else steps * batch
    wanted = HeadRows(wanted.workspace, min(most, wanted.logits))
    kept, budget = 0, memory_budget
    if rnn is not None and rnn.gates > 1 and device in PRE_ACTIVATION_DEVICES:
        units = rnn.layers * PRE_ACTIVATIONS * rnn.units
        kept = steps * batch * units * dtypes.accumulation.itemsize
    if budget is not None:
        kept = kept if logit_bytes <= budget - kept >= budget // 2 else 0
        budget -= kept
    plan = fill_budget(steps, batch, logit_bytes, exps_bytes, budget, wanted)
    workspace = plan.rows * exps_bytes + plan.logit_rows * logit_bytes
    if budget is None and kept > max(KEPT_GRAPH, workspace):
        kept = 0
    bounded = memory_budget is not None
    pieces = -(-CELL_ROWS.get(device, CELL_ROWS["cpu"]) // max(1, batch))
    if kept > 0:  # pre-activations are not formed: twice as many steps take the same memory
        pieces *= 2
    return Plan(plan.rows, plan.logit_rows, bounded, pieces, gradients_in_forward, kept)


def fill_budget(
    steps: int, batch: int, logit_bytes: int, exps_bytes: int, memory_budget: int | None,
    wanted: HeadRows,
) -> Plan:  # fmt: skip
    """Fill the memory budget with whole steps, or with as many rows of one step as it holds.

    `logit_bytes` and `exps_bytes` are the sizes of a row [V] of logits and of exponentials.
    """
    logit_rows = max(1, wanted.logits)
    if memory_budget is None:
        # Windows get equal numbers of rows: a last window of few rows would be slow.
        windows = max(1, steps * batch * exps_bytes // (wanted.workspace * logit_bytes))
        rows = -(-steps // windows) * batch
    else:
        logit_rows = max(1, min(logit_rows, memory_budget // (logit_bytes + exps_bytes)))
        rows = (memory_budget - logit_rows * logit_bytes) // exps_bytes
        rows = rows - rows % max(1, batch) or rows
    return Plan(max(1, min(rows, steps * batch)), logit_rows)


def keeps_graph(begin: int, steps: int, graph: int, growth: int) -> bool:
    """Tell whether the graph of the steps from `begin` on is kept, from the bytes of the first
    step's graph and the growth of the state since. It will go on growing, and counts twice: a
    cache, and its frozen copy.
    """
    left = steps - begin
    mean = growth * (begin - 1 + left / 2) / max(1, begin - 1)
    return left * (graph + 2 * mean) <= KEPT_GRAPH
