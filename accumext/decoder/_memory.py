"""What a call of the decoder has at once, predicted from shapes."""

from __future__ import annotations

from accumext.decoder._arguments import Job
from accumext.decoder._cells import parameter_tensors
from accumext.decoder._fused_cross_entropy import accumulation_dtype, product_dtype
from accumext.decoder._half_matmul import SLICE, exps_dtype
from accumext.decoder._plan import Plan, cell_steps
from accumext.decoder._rnn_weights import GRU, LSTM, RNN_RELU, RNN_TANH, Layers
from accumext.decoder._run import run_plan

# A callable cell is taken to be a GRU as torch builds it: tensors of [B, H] that the graph of one
# step keeps, as measured; and its gates, where it does not show its weights.
GRAPH, GATES = 10, 3
# What torch's recurrent modules have of every row in a pass back: the products of gates and what is
# made of them, then their gradients, in units.
OF_A_ROW = {GRU: 10, LSTM: 8, RNN_TANH: 1, RNN_RELU: 1}


def predicted_peak(job: Job, layers: Layers | None) -> int:
    """Bytes that a call and its backward pass have at once, gradients of the parameters included.

    Three moments can be the highest: the end of the head's pass, with the workspace; the pass
    through the cell; and the embedding's gradient at the end. Main gradients that take the place of
    the parameters' gradients are counted as such.
    """
    operand = product_dtype(job.weight)
    plan = run_plan(job, operand)
    vocabulary, hidden = job.weight.shape
    rows, width = job.table.weight.shape
    tokens = job.steps * job.batch
    wide = accumulation_dtype(job.weight.dtype).itemsize
    narrow = job.weight.element_size()
    kept_exps = exps_dtype(
        operand, job.weight.device, accumulation_dtype(job.weight.dtype)
    ).itemsize

    head = vocabulary * wide * (hidden * job.weight.requires_grad + (job.bias is not None))
    d_hidden = tokens * hidden * wide
    casts = vocabulary * hidden * operand.itemsize * (operand != job.weight.dtype)
    workspace = vocabulary * (plan.rows * kept_exps + plan.columns * wide)
    workspace += 6 * plan.rows * hidden * wide
    if operand.itemsize < wide:  # a slice of a product; widened where it is added to another
        slices = operand.itemsize + wide * (plan.rows < tokens)
        workspace += min(SLICE, vocabulary) * hidden * slices
    books = tokens * (5 * 8 + wide + 2)  # tokens, inputs, targets; losses; masks
    table = rows * width * wide
    if not job.table.weight.requires_grad or job.weight is job.table.weight:
        table = 0
    final = vocabulary * hidden * narrow * (narrow < wide) * job.weight.requires_grad
    final += table // wide * narrow * (narrow < wide)

    if layers is None:
        kept, cell = _callable_cell(job, plan, wide)
        # rows looked up come as outputs and their gradients go; in the end all are joined
        embedding = table + 2 * tokens * width * wide - d_hidden - kept
    else:
        kept, cell = _layers(job, layers, wide)
        cell += table
        embedding = table + final
    formed = casts + workspace + kept + head + d_hidden  # forward or, if they must wait, backward
    backward = head + d_hidden + kept + max(cell, embedding)
    return books + max(formed, backward)


def _layers(job: Job, layers: Layers, wide: int) -> tuple[int, int]:
    """States of every step; and what the backward pass through the layers adds."""
    states = layers.parts * layers.count * (job.steps + 1) * job.batch * layers.units
    masks = job.steps * (layers.count - 1) * job.batch * layers.units * (layers.dropout > 0)
    steps = min(max(end - begin for begin, _, end in job.windows()), cell_steps(job.batch))
    width = job.table.weight.shape[1]
    row = OF_A_ROW[layers.kind] * layers.units + width
    if layers.count > 1:  # the layer above has left the gradient of its inputs
        row = max(row, (OF_A_ROW[layers.kind] + 1) * layers.units) + layers.units
    elif job.k2 is not None and job.k1 != job.k2:  # windows overlap: what counted before is zeroed
        row += layers.units
    given = [w for w in layers.weights if w is not None]
    weights = sum(w.numel() for w in given)
    weights *= 2 if given[0].element_size() < wide else 1  # as the products take them
    transposed = sum(w.numel() for w in layers.weights[1::4] if w is not None)
    return states * wide + masks, (steps * job.batch * row + weights + transposed) * wide


def _callable_cell(job: Job, plan: Plan, wide: int) -> tuple[int, int]:
    """Outputs and states at the borders of segments; a segment's graph, and what it leaves."""
    hidden, width = job.weight.shape[1], job.table.weight.shape[1]
    outputs = job.steps * job.batch * hidden * job.table.weight.element_size()
    graph = min(plan.segment, job.steps) * job.batch * (GRAPH * hidden + width) * wide
    shown = sum(p.numel() for p in parameter_tensors(job.cell))
    weights = (shown or GATES * hidden * (hidden + width)) * wide
    return outputs + outputs // plan.segment, graph + weights
