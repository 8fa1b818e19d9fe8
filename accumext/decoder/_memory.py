"""What a call of the decoder keeps in memory: the sizes that it chooses, and the predicted peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from accumext.decoder._arguments import DecodeArguments
from accumext.recurrence import GRU, LSTM, RNN_RELU, RNN_TANH, RnnWeights


class HeadRows(NamedTuple):
    """How many rows go through the head together."""

    # That let the deferred products run at full speed, in the dtype of logits: with fewer, the
    # traffic of the head's weight and its gradient dominates. Twice as many where exponentials take
    # half as much, and less than twice of that where these would not fill it a second time.
    workspace: int
    logits: int  # of logits that exist at once, where so many are known


# On a CPU, the widest product of few columns that is fast; a GPU wants hundreds of rows.
HEAD_ROWS = {"cpu": HeadRows(256, 32), "cuda": HeadRows(1024, 512)}

# Steps whose cell graph is rebuilt at once in the backward pass of a callable cell. Longer segments
# save little: the states between segments are T/16 of all states.
SEGMENT = 16

# Bytes of the graph of a callable cell that are kept rather than computed again: all of a small
# decoder's, where steps take longer than their arithmetic. None where memory is bounded.
KEPT_GRAPH = 2**24

# Rows of pre-activations that the backward pass of torch's modules forms at once: on a GPU so many
# that products fill it and launches are few.
CELL_ROWS = {"cpu": 256, "cuda": 2048}

# Rows whose known inputs torch's modules multiply at once.
INPUT_ROWS = {"cpu": 512, "cuda": 2048}

# What the backward pass of torch's modules has per row, in units: the products of the gates and
# what is computed from them, then their gradients.
BACKWARD_UNITS = {GRU: 10, LSTM: 8, RNN_TANH: 1, RNN_RELU: 1}


@dataclass(frozen=True)
class WorkspacePlan:
    """The sizes that one call keeps to."""

    rows: int  # of exponentials in the workspace: a multiple of B where a step fits
    logit_rows: int  # rows of logits at once
    segment: int  # steps of a callable cell's graph at once


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes of the steps of a callable cell whose graph exists at once."""

    alone: int  # their graph and backward pass, with the gradients of parameters and context
    after_others: int  # the same, where the gradients of other segments are there before
    gradients: int  # of parameters and context, that are left
    state: int  # between two segments
    graph: int  # of a step
    kept: int  # steps whose graph is kept rather than made again


def longest_segment(args: DecodeArguments) -> int:
    """Steps of a callable cell whose graph exists at once, at most."""
    windows = args.windows()
    if len(windows) > 1:
        return max(end - begin for begin, _, end in windows)
    period = args.steps if args.k2 is None else args.k2
    return max(1, min(SEGMENT, args.steps, period))


def keeps_graph(steps: int, graph: int, growth: int) -> bool:
    """Whether the graph of so many last steps is kept: by the bytes of the first step's, and those
    by which the state has grown since. It keeps what it reads of a cache, and a frozen copy."""
    return steps * (graph + 2 * growth) <= KEPT_GRAPH


def workspace_plan(args: DecodeArguments) -> WorkspacePlan:
    """The sizes of this call."""
    vocabulary, dtypes = args.head_weight.shape[0], args.dtypes
    rows = HEAD_ROWS.get(args.head_weight.device.type, HEAD_ROWS["cpu"])
    known = not (args.free_running and args.head_gradients_in_forward)
    most = args.steps * args.batch if known else args.batch  # known rows of logits at once
    return fill_budget(
        args.steps, args.batch, vocabulary * dtypes.accumulation.itemsize,
        vocabulary * dtypes.exps.itemsize, args.memory_budget,
        rows._replace(logits=min(most, rows.logits)),
    )  # fmt: skip


def fill_budget(
    steps: int, batch: int, logit_bytes: int, exps_bytes: int, memory_budget: int | None,
    wanted: HeadRows,
) -> WorkspacePlan:  # fmt: skip
    """Fill the memory budget with whole steps, or with as many rows of one step as it holds.

    `logit_bytes` and `exps_bytes` are those of a row [V] of logits and of exponentials.
    """
    logit_rows = max(1, wanted.logits)
    if memory_budget is None:
        # What is left over after so many rows at a time is shared out: a window of few is slow.
        windows = max(1, steps * batch * exps_bytes // (wanted.workspace * logit_bytes))
        rows = -(-steps // windows) * batch
    else:
        logit_rows = max(1, min(logit_rows, memory_budget // (logit_bytes + exps_bytes)))
        rows = (memory_budget - logit_rows * logit_bytes) // exps_bytes
        if rows >= batch > 0:
            rows -= rows % batch
    return WorkspacePlan(max(1, min(rows, steps * batch)), logit_rows, SEGMENT)


def backward_steps(device: str, batch: int) -> int:
    """Steps that the backward pass of torch's modules takes at once: CELL_ROWS rows of them."""
    return -(-CELL_ROWS.get(device, CELL_ROWS["cpu"]) // max(1, batch))


def predicted_peak(args: DecodeArguments, segment: SegmentMemory | None = None) -> int:
    """Bytes that a call and its backward pass have at once, gradients of the parameters included.
    `segment`: of a callable cell.

    Three moments can be the highest: the end of the head's pass, with the workspace; the pass
    through the cell; and the embedding's gradient at the end. Main gradients that take the place of
    the parameters' gradients are counted as such.
    """
    weight, table = args.head_weight, args.table.weight
    plan, product = workspace_plan(args), args.dtypes.product
    vocabulary, hidden = weight.shape
    rows, width = table.shape
    tokens = args.steps * args.batch
    size = args.dtypes.accumulation.itemsize
    half = weight.element_size() < size

    head = vocabulary * size * (hidden * weight.requires_grad + (args.head_bias is not None))
    d_hidden = tokens * hidden * size
    casts = vocabulary * hidden * product.itemsize * (product != weight.dtype)
    workspace = vocabulary * plan.rows * args.dtypes.exps.itemsize
    copies = 6 if segment is None else 4  # of outputs; a callable's own are read as they are
    passing = vocabulary * plan.logit_rows * size + copies * plan.rows * hidden * size
    token_buffers = tokens * (5 * 8 + size + 2)  # tokens, inputs, targets; losses; masks
    d_table = rows * width * (table.requires_grad and not args.tied)
    final = vocabulary * hidden * weight.element_size() * half * weight.requires_grad
    final += d_table * weight.element_size() * half
    d_table *= size

    if args.rnn_weights is None:
        assert segment is not None
        windows, steps = args.windows(), longest_segment(args)
        outputs = tokens * hidden * weight.element_size()
        states = outputs + segment.state * ((args.steps - 1) // steps)
        lookups = args.batch * sum(end - begin for begin, _, end in windows)
        looked_up = width * table.element_size() * table.requires_grad  # and the gradient is kept
        # The pass back begins and ends with a segment; then all rows looked up are joined.
        others = (lookups - steps * args.batch) * looked_up
        # Of the graph that is kept, the last segment is one, unless it is the first step alone.
        kept, before = segment.graph * segment.kept, segment.graph * (segment.kept > 0)
        first = kept - segment.graph * steps if segment.kept > 1 else kept
        first = states - outputs + segment.alone + max(0, first)
        cell = max(first, others + segment.after_others + before) - states
        embedding = segment.gradients + d_table + 2 * lookups * looked_up - d_hidden - states
    else:
        states, cell = _rnn_path(args, args.rnn_weights, size)
        passing = max(passing, _input_products(args, args.rnn_weights, size))
        cell += d_table
        embedding = d_table + final
        kept = 0
    states += tokens * hidden * size * args.return_outputs
    # in the forward or the backward pass
    formed = casts + workspace + passing + states + head + d_hidden + kept
    backward = head + d_hidden + states + max(cell, embedding)
    return token_buffers + max(formed, backward)


def _rnn_path(args: DecodeArguments, rnn: RnnWeights, size: int) -> tuple[int, int]:
    """States of every step; and what the backward pass through the layers adds."""
    states = rnn.state_parts * rnn.layers * (args.steps + 1) * args.batch * rnn.units
    between = (rnn.layers - 1) * rnn.units * (rnn.dropout > 0)
    around = args.table.weight.shape[1] * (args.embedding_dropout > 0)
    around += rnn.units * (args.output_dropout > 0)
    masks = args.steps * args.batch * (between + around)
    longest = max(end - begin for begin, _, end in args.windows())
    steps = min(longest, backward_steps(args.device.type, args.batch))
    row = BACKWARD_UNITS[rnn.kind] * rnn.units + args.table.weight.shape[1]
    if rnn.layers > 1:  # the layer above has left the gradient of its inputs
        row = max(row, (BACKWARD_UNITS[rnn.kind] + 1) * rnn.units) + rnn.units
    elif args.k2 is not None and args.k1 != args.k2:  # overlapping windows: d_out with zeros
        row += rnn.units
    given = [w for w in rnn.weights if w is not None]
    gradients = sum(w.numel() for w in given) * size
    operands = args.dtypes.cell  # of the products
    casts = sum(w.numel() for w in given if w.dim() == 2) * operands.itemsize
    casts *= given[0].dtype != operands
    transposed = sum(w.numel() for w in rnn.weights[1::4] if w is not None) * operands.itemsize
    transposed *= args.device.type != "cpu"  # whose kernels take a weight as it lies
    temporaries = steps * args.batch * row * size
    return states * size + masks, temporaries + gradients + casts + transposed


def _input_products(args: DecodeArguments, rnn: RnnWeights, size: int) -> int:
    """What the forward pass through the layers has at once where the inputs are known."""
    rows = INPUT_ROWS.get(args.device.type, INPUT_ROWS["cpu"])
    if args.free_running:
        return 0
    steps = min(args.steps, max(1, rows // max(1, args.batch)))
    inputs = (args.table.weight.shape[1] + rnn.units) * args.dtypes.cell.itemsize
    return steps * args.batch * (inputs + rnn.gates * rnn.units * size)
