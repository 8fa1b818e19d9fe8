"""How much a decode keeps alive: rows of logits, steps of the cell's graph, the peak that
follows."""

from __future__ import annotations

from dataclasses import dataclass

from accumext._decode_args import Job
from accumext._head import accumulation_dtype, logit_row_bytes

# Rows enough for the deferred products to run at their full speed, few enough to stay small beside
# one [V, H] gradient.
AUTOMATIC_WORKSPACE = 32 * 2**20  # bytes of logits

# Steps whose cell graph is rebuilt at once in the backward pass. Longer saves little: the states at
# the borders of the segments are T/16 of them.
SEGMENT = 16

# Tensors of [B, H] that the graph of one step of a GRU or LSTM keeps, per layer, as torch builds
# it.
GATES = 14


@dataclass(frozen=True)
class Plan:
    """The sizes a run keeps to."""

    rows: int  # logit rows of the workspace: a multiple of B where a step fits
    segment: int  # steps


def make_plan(job: Job) -> Plan:
    """Fill the memory budget with whole steps, or with as many rows of one step as it holds."""
    budget = AUTOMATIC_WORKSPACE if job.memory_budget is None else job.memory_budget
    rows = max(1, budget // logit_row_bytes(job.weight))
    if rows >= job.batch > 0:
        rows -= rows % job.batch
    return Plan(min(rows, max(1, job.steps * job.batch)), SEGMENT)


def predicted_peak(job: Job, samples: bool) -> int:
    """Bytes that a call and its backward pass have at once, gradients of the parameters included.

    Three moments can be the highest: the end of the forward pass, with the workspace; the pass
    through the cell; and the embedding's gradient at the end. The head's gradient is there at all
    of them.
    """
    plan = make_plan(job)
    vocabulary, hidden = job.weight.shape
    rows, width = job.table.weight.shape
    tokens = job.steps * job.batch
    wide = accumulation_dtype(job.weight.dtype).itemsize
    narrow = job.weight.element_size()
    output = tokens * hidden * job.table.weight.element_size()
    lookups = tokens * width * job.table.weight.element_size()
    trained = job.weight.requires_grad
    head = vocabulary * hidden * wide * trained + vocabulary * wide * (job.bias is not None)
    head_cast = vocabulary * hidden * narrow * (narrow < wide) * trained
    d_hidden = tokens * hidden * wide * (job.reduction != "none")
    kept = output + output // plan.segment + tokens * (2 * 8 + wide + 1)

    copy = vocabulary * hidden * wide * (narrow < wide)
    workspace = plan.rows * (vocabulary + 6 * hidden) * wide
    noise = min(plan.rows, job.batch) * vocabulary * wide * samples
    forward = copy + workspace + noise + kept + d_hidden + head * (job.reduction != "none")

    graph = min(plan.segment, job.steps) * job.batch * (GATES * hidden + width) * wide
    cell = kept - output + d_hidden + head + head_cast + graph + lookups
    if job.reduction == "none":  # the gradients are formed in the backward pass
        cell = max(cell, kept + tokens * hidden * wide + head + copy + workspace)
    table = 0
    if job.table.weight.requires_grad and job.weight is not job.table.weight:
        table = rows * width * wide + rows * width * narrow * (narrow < wide)
    embedding = kept - output + head + head_cast + table + 2 * lookups
    return max(forward, cell, embedding)
