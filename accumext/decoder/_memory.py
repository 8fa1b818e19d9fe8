"""The peak memory that `decode_memory` predicts.

A callable cell's part of it is measured: a segment of its steps and their backward pass run on
tensors without data.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from accumext.decoder._callable import CallableSteps, segments_of
from accumext.decoder._model import Model
from accumext.decoder._objective import Objective
from accumext.decoder._plan import HANDED_OUT, PRE_ACTIVATIONS, SEGMENT, Plan, keeps_graph
from accumext.decoder._rnn_weights import GRU, LSTM, RNN_RELU, RNN_TANH, RnnWeights
from accumext.decoder._tokens import Tokens
from accumext.recurrence import State, Truncation, map_tensors, parameter_tensors, tensors
from accumext.tensors.torch_private import (
    Allocations,
    fake_tensors,
    is_since,
    leaf_of,
    next_node_number,
    nodes_since,
    unchanged,
    unhooked,
)

# Rows whose known inputs torch's modules multiply at once.
INPUT_ROWS = {"cpu": 512, "cuda": 2048}

# Units that the backward pass of torch's modules has per row: the products of the gates and the
# numbers computed from them, unless these are kept, then their gradients.
BACKWARD_UNITS = {GRU: 10, LSTM: 8, RNN_TANH: 1, RNN_RELU: 1}
GRADIENT_UNITS = {GRU: 6, LSTM: 4, RNN_TANH: 1, RNN_RELU: 1}

# A cell that does not run without data is taken to be a GRU as torch builds it: tensors of [B, H]
# that the graph of one step keeps, as measured; and its gates, where its weights are not known.
GRAPH, GATES = 10, 3


class Call(NamedTuple):
    """The arguments of `decode_loss` that its memory depends on."""

    model: Model
    tokens: Tokens
    objective: Objective
    truncation: Truncation
    plan: Plan
    return_outputs: bool
    observations: int = 0  # bytes of a copy of them, if there is one

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Steps whose graph or gradients exist together, as `Truncation.spans`."""
        return self.truncation.spans(self.tokens.steps)

    @property
    def longest_segment(self) -> int:
        """Steps of a callable cell whose graph exists at once, at most."""
        spans = self.spans
        if len(spans) > 1:
            return max(end - begin for begin, _, end in spans)
        return max(1, min(SEGMENT, self.tokens.steps, self.truncation.period or SEGMENT))


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes of the steps of a callable cell whose graph exists at once."""

    alone: int  # their graph and backward pass, with the gradients of parameters and context
    gradients: int  # of parameters and context, that are left
    state: int  # between two segments
    graph: int  # of a step
    kept: int  # steps whose graph is kept rather than made again


def predicted_peak(call: Call, cell: Any) -> int:
    """Bytes that a call and its backward pass have at once, gradients of the parameters included.
    `cell` is the argument of this name.

    Three moments can be the highest: the end of the head's pass, with the workspace; the pass
    through the cell; and the embedding's gradient at the end. Main gradients that take the place of
    the parameters' gradients are counted as such.
    """
    model, tokens, plan = call.model, call.tokens, call.plan
    segment = None if model.rnn is not None else segment_memory(call, cell)
    weight, table, product = model.head_weight, model.table.weight, model.dtypes.product
    vocabulary, hidden = weight.shape
    rows, width = table.shape
    count = tokens.steps * tokens.batch
    size = model.dtypes.accumulation.itemsize
    half = weight.element_size() < size

    bias = model.head_bias is not None and model.head_bias.requires_grad
    head = vocabulary * size * (hidden * weight.requires_grad + bias)
    d_hidden = count * hidden * size
    casts = vocabulary * hidden * product.itemsize * (product != weight.dtype)
    workspace = vocabulary * plan.rows * model.dtypes.exps.itemsize
    soft = call.objective.soft  # beside the logits are a teacher's, or its probabilities
    logits = 1 if soft is None or soft.indices is not None else 2
    passing = logits * vocabulary * plan.logit_rows * size + 3 * plan.rows * hidden * size
    # Outputs, and the weight's rows of the targets, before or after they are converted.
    passing += 2 * plan.rows * hidden * product.itemsize * (product.itemsize < size)
    token_buffers = count * (5 * 8 + size + 2)  # tokens, inputs, targets; losses; masks
    token_buffers += call.observations
    d_table = rows * width * (table.requires_grad and not model.tied)
    final = vocabulary * hidden * weight.element_size() * half * weight.requires_grad
    final += d_table * weight.element_size() * half
    d_table *= size

    if model.rnn is None:
        assert segment is not None
        spans, steps = call.spans, call.longest_segment
        outputs = count * hidden * weight.element_size()
        states = outputs + segment.state * ((tokens.steps - 1) // steps)
        lookups = tokens.batch * sum(end - begin for begin, _, end in spans)
        looked_up = width * table.element_size() * table.requires_grad  # and the gradient is kept
        # The pass back begins and ends with a segment; then all rows looked up are joined.
        others = (lookups - steps * tokens.batch) * looked_up
        # Of the graph that is kept, the last segment is one, unless it is the first step alone.
        kept, before = segment.graph * segment.kept, segment.graph * (segment.kept > 0)
        first = kept - segment.graph * steps if segment.kept > 1 else kept
        first = states - outputs + segment.alone + max(0, first)
        cell = max(first, others + segment.alone + before) - states
        embedding = segment.gradients + d_table + 2 * lookups * looked_up - d_hidden - states
    else:
        states, temporaries, left = _rnn_path(call, model.rnn, size)
        if not tokens.free_running:
            passing += count * (8 + size)  # indices; losses
            passing = max(passing, _input_products(call, model.rnn, size))
        final += sum(w.nbytes for w in model.rnn.weights if w is not None) * half
        cell = d_table + left + temporaries
        embedding = d_table + left + final
        kept = 0
    returned = count * hidden * size * call.return_outputs
    # in the forward or the backward pass
    formed = casts + workspace + passing + states + head + d_hidden + kept
    formed += returned * (segment is not None)  # torch's modules copy them afterwards
    backward = head + d_hidden + states + returned + max(cell, embedding)
    peak: int = token_buffers + max(formed, backward)
    return peak


def _rnn_path(call: Call, rnn: RnnWeights, size: int) -> tuple[int, int, int]:
    """Bytes of the states of every step and what else the passes share, and those that the backward
    pass of the layers has for a while and until its end."""
    model, tokens, truncation = call.model, call.tokens, call.truncation
    device, width = model.device.type, model.table.weight.shape[1]
    state = rnn.state_parts * rnn.layers * tokens.batch * rnn.units * size
    states = state * (tokens.steps + 3)  # before and after every step; the given and the last one
    between = (rnn.layers - 1) * rnn.units * (rnn.dropout > 0)
    around = width * (model.embedding_dropout > 0)
    around += rnn.units * (model.output_dropout > 0)
    masks = tokens.steps * tokens.batch * (between + around)
    longest = max(end - begin for begin, _, end in call.spans)
    steps = min(longest, call.plan.backward_steps)
    kept = call.plan.pre_activation_bytes
    units = (GRADIENT_UNITS if kept else BACKWARD_UNITS)[rnn.kind]
    operands = model.dtypes.cell  # of the products
    rounded = 0  # beside the gradients, after the rest: what a weight's gradient is a product of
    if operands.itemsize < size:
        rounded = (rnn.gates * rnn.units + max(rnn.units, width)) * operands.itemsize // size
    row = max(units * rnn.units, GRADIENT_UNITS[rnn.kind] * rnn.units + rounded) + width
    if model.embedding_dropout > 0:  # the gradient of what was read, the mask, their product
        row = max(row, rnn.gates * rnn.units + 3 * width)
    if rnn.layers > 1:  # the layer above has left the gradient of its inputs
        if rnn.layers > 2:  # and one between two others makes that of its own
            row = max(row, (units + 1) * rnn.units)
        row += rnn.units
    elif len(call.spans) > 1 and truncation.k1 != truncation.k2:
        # overlapping windows: d_out with zeros
        row += rnn.units
    row += rnn.units * (model.output_dropout > 0)
    given = [w for w in rnn.weights if w is not None]
    gradients = sum(w.numel() for w in given) * size
    cast = [w for w in given if w.dim() == 2 and w.dtype != operands]
    casts = sum(w.numel() for w in cast) * operands.itemsize
    transposed = sum(w.numel() for w in rnn.weights[1::4] if w is not None) * operands.itemsize
    transposed *= device not in HANDED_OUT  # a CPU's kernels take a weight as it lies
    temporaries = steps * tokens.batch * row * size
    left = gradients + transposed + 2 * state  # whose gradient is that of a window and the sum
    return states + masks + kept + casts, temporaries, left


def _input_products(call: Call, rnn: RnnWeights, size: int) -> int:
    """Bytes that the forward pass through the layers has at once where the inputs are known."""
    model, tokens = call.model, call.tokens
    rows = INPUT_ROWS.get(model.device.type, INPUT_ROWS["cpu"])
    steps = min(tokens.steps, max(1, rows // max(1, tokens.batch)))
    inputs = (model.table.weight.shape[1] + rnn.units) * model.dtypes.cell.itemsize
    products = rnn.gates
    if rnn.gates > 1 and model.device.type in HANDED_OUT:
        products = 0 if call.plan.pre_activation_bytes else PRE_ACTIVATIONS
    return steps * tokens.batch * (inputs + products * rnn.units * size)


def segment_memory(call: Call, cell: Any) -> SegmentMemory:
    """The memory of a segment of this call.

    Nothing is computed, drawn or written, and the modules that the cell is made of get back what
    their attributes were.
    """
    late, ahead = call, call.tokens.steps - call.longest_segment
    try:
        with (
            fake_tensors() as fake, unchanged(_modules(cell)), _own_autocast_cache(),
            torch.enable_grad(), warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")  # the call itself will warn
            state = _grown(call, fake, ahead)
            late = call._replace(tokens=replace(call.tokens, state=state))
            # Two steps at least, of which the second adds to the gradients of the first.
            steps = max(call.longest_segment, min(2, call.tokens.steps))
            alone = _measured(late, fake, steps)
            first = alone
            if state is not call.tokens.state:
                first = _measured(call, fake, 1)
    except Exception:  # whatever a cell raises that asks for values
        alone = first = _like_gru(call)
    finally:
        call.model.table.discard_gradients()
    peak, gradients, size, graph = alone
    steps = call.tokens.steps
    table = call.model.table.weight
    # The call counts what the graph of its first step saves: not the embeddings that it reads.
    read = call.tokens.batch * table.shape[1] * table.element_size()
    kept = _kept_steps(call, first[3] - read, (size - first[2]) // max(1, steps - 1))
    graph -= (graph - first[3]) * kept // max(1, 2 * steps)  # of those on average
    return SegmentMemory(peak, gradients, (first[2] + size) // 2, graph, kept)


def _kept_steps(call: Call, graph: int, growth: int) -> int:
    """Steps whose graph the path for callables keeps, by the bytes of the first one's and those
    that each adds to the state: see `CallableSteps`."""
    steps = call.tokens.steps
    if call.plan.bounded or len(call.spans) > 1:
        return 0
    return sum(
        end - begin
        for begin, end in segments_of(call.truncation, steps, measures=True)
        if begin == 0 or keeps_graph(steps - begin, graph, growth * (begin - 1))
    )


def _like_gru(call: Call) -> tuple[int, int, int, int]:
    """As `_measured`, of a GRU."""
    model, batch = call.model, call.tokens.batch
    size = model.dtypes.accumulation.itemsize
    hidden, width = model.head_weight.shape[1], model.table.weight.shape[1]
    graph = batch * (GRAPH * hidden + width) * size
    known = sum(p.numel() for p in parameter_tensors(model.cell))
    weights = (known or GATES * hidden * (hidden + width)) * size
    peak = call.longest_segment * graph + weights
    return peak, weights, batch * hidden * size, graph


def _measured(call: Call, fake: Any, steps: int) -> tuple[int, int, int, int]:
    """Bytes of a segment's graph and backward pass, of the gradients that are left, of a state, and
    of a step's graph."""
    state = map_tensors(partial(_copy, requires_grad=True), call.tokens.state)
    run = _without_data(call, steps)
    d_hidden = run.anchor.new_empty(steps, call.tokens.batch, call.model.head_weight.shape[1])

    with Allocations(fake) as memory:
        first = next_node_number()
        segment, last = run.run_steps(0, 0, steps, state)
        hidden = segment.hidden
        del segment
        size = sum({id(t.untyped_storage()): t.nbytes for t in tensors(last)}.values())
        if not hidden.requires_grad:
            return memory.peak, 0, size, 0
        kept = [run.anchor, *tensors(state)]
        edges, weights = _leaves(hidden, first, kept)
        differentiable = [t for t in tensors(last) if t.requires_grad]
        roots = [get_gradient_edge(t) for t in (hidden, *differentiable)]
        del hidden  # the backward pass, which runs the segment again, does not stack its outputs
        graph = memory.now // steps
        gradients = [d_hidden, *map(torch.empty_like, differentiable)]
        del last, differentiable
        with unhooked(weights):
            torch.autograd.grad(roots, edges, gradients, allow_unused=True)
    return memory.peak, sum(weight.nbytes for weight in weights), size, graph


def _without_data(call: Call, steps: int) -> CallableSteps:
    """Steps to run on tensors without data."""
    model, tokens, table = call.model, call.tokens, call.model.table.weight
    shape = (steps, tokens.batch)
    empty = partial(torch.empty, device=table.device)
    ends = tokens.eos is not None or tokens.within_length is not None
    gate = call.truncation.gate(tokens.steps, tokens.batch, model.head_weight)
    transcript: Any = SimpleNamespace(
        model=model, tokens=tokens, gate=gate, inputs=empty(shape, dtype=torch.int64),
        active=empty(shape, dtype=torch.bool) if ends else None,
    )  # fmt: skip
    anchor = empty(0, dtype=table.dtype, requires_grad=table.requires_grad)
    context = tuple(_copy(tensor, tensor.requires_grad) for tensor in model.context)
    return CallableSteps(transcript, None, anchor, context, True, call.return_outputs, known=steps)


def _grown(call: Call, fake: Any, ahead: int) -> State:
    """The state `ahead` steps later: each adds to it what the second does."""
    given = call.tokens.state
    if ahead < 2:
        return given
    run = _without_data(call, 1)
    with Allocations(fake), torch.no_grad():
        start = map_tensors(partial(_copy, requires_grad=False), given)
        _, one = run.run_steps(0, 0, 1, start)
        _, two = run.run_steps(0, 0, 1, one)
    before = iter(tensors(one))

    def longer(leaf: Tensor) -> Tensor:
        sizes = zip(next(before).shape, leaf.shape, strict=True)
        return leaf.new_empty([was + (ahead - 1) * (now - was) for was, now in sizes])

    grows = [t.shape for t in tensors(one)] != [t.shape for t in tensors(two)]
    return map_tensors(longer, two) if grows else given


def _copy(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The tensor without its data, a leaf."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return torch.empty_like(tensor).requires_grad_(requires_grad and differentiable)


def _leaves(
    output: Tensor, first: int, kept: list[Tensor]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """The edges by which gradients leave the graph, towards leaves and nodes from before `first`;
    and the leaves but for `kept`, of which every segment has its own."""
    edges: list[GradientEdge] = []
    leaves: list[Tensor] = []
    outward = {
        (node, index)
        for inner in nodes_since(first, [output])
        for node, index in inner.next_functions
        if node is not None and not is_since(node, first)
    }
    for node, index in outward:
        leaf = leaf_of(node)
        edges.append(GradientEdge(node, index))
        if leaf is not None and not any(leaf is tensor for tensor in kept):
            leaves.append(leaf)
    return edges, leaves


def _modules(cell: Any) -> list[nn.Module]:
    """The modules that a callable is, is bound to or names."""
    if isinstance(cell, nn.Module):
        return [cell]
    if isinstance(cell, partial):
        return _modules(cell.func)
    owner = getattr(cell, "__self__", None)
    named: list[Any] = [owner, *getattr(cell, "__dict__", {}).values()]
    function = cell if inspect.isroutine(cell) else type(cell).__call__
    if inspect.isfunction(function) or inspect.ismethod(function):
        variables = inspect.getclosurevars(function)
        named += [*variables.nonlocals.values(), *variables.globals.values()]
    return [value for value in named if isinstance(value, nn.Module)]


@contextmanager
def _own_autocast_cache() -> Iterator[None]:
    """Weights that autocast has rounded are kept for as long as it is on: none of these here."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
