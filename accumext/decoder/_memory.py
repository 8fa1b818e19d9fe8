"""The peak memory that `decode_memory` predicts.

A callable cell's part of it is measured: a segment of its steps and their backward pass run on
tensors without data.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from accumext.decoder._call import Call, call_from, steps_first
from accumext.decoder._callable_steps import CallableSteps, segments
from accumext.decoder._decode_loss import decode_loss
from accumext.decoder._model import OP, head_weights
from accumext.decoder._observations import rows_of
from accumext.decoder._plan import HANDED_OUT, PRE_ACTIVATIONS, SEGMENT, keeps_graph
from accumext.recurrence import (
    GRU,
    LSTM,
    RNN_RELU,
    RNN_TANH,
    RnnWeights,
    State,
    formula_weights,
    map_tensors,
    parameter_tensors,
    tensors,
)
from accumext.tensors.checks import bools, explained, fail_type, type_name
from accumext.tensors.torch_private import (
    Allocations,
    base_of,
    fake_tensors,
    is_since,
    leaf_of,
    next_node_number,
    nodes_since,
    unchanged,
    unhooked,
)

P = ParamSpec("P")

# Rows whose known inputs torch's modules multiply at once.
INPUT_ROWS = {"cpu": 512, "cuda": 2048}

# Units that the backward pass of torch's modules has per row: the products of the gates and the
# numbers computed from them, unless these are kept, then their gradients.
BACKWARD_UNITS = {GRU: 10, LSTM: 8, RNN_TANH: 1, RNN_RELU: 1}
GRADIENT_UNITS = {GRU: 6, LSTM: 4, RNN_TANH: 1, RNN_RELU: 1}

# A cell that does not run without data is taken to be a GRU as torch builds it: tensors of [B, H]
# that the graph of one step keeps, as measured; and its gates, where its weights are not known.
GRAPH, GATES = 10, 3


class DecodeMemory(Protocol[P]):
    """The type of `decode_memory`: that of `decode_loss`, but for the targets and the result."""

    def __call__(
        self,
        embedding: nn.Embedding | Tensor | None,
        cell: nn.Module | Callable[..., Any],
        head: nn.Linear | tuple[Tensor, Tensor | None],
        targets: Tensor | tuple[int, int] | None,
        *args: P.args,
        **options: P.kwargs,
    ) -> int: ...


def _with_parameters_of(
    function: Callable[Concatenate[Any, Any, Any, Any, P], Any],
) -> Callable[[Callable[[dict[str, Any]], int]], DecodeMemory[P]]:
    """Let a function be called with the arguments of another, and take them by name."""
    signature = inspect.signature(function)
    parameters = dict(signature.parameters)
    targets = "Tensor | tuple[int, int] | None"
    parameters["targets"] = parameters["targets"].replace(annotation=targets)
    signature = inspect.Signature([*parameters.values()], return_annotation="int")

    def decorate(predict: Callable[[dict[str, Any]], int]) -> DecodeMemory[P]:
        @functools.wraps(predict)
        def call(*args: Any, **options: Any) -> int:
            try:
                bound = signature.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{predict.__name__}() {error}") from None
            bound.apply_defaults()
            return predict(bound.arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


@explained
@_with_parameters_of(decode_loss)
def decode_memory(given: dict[str, Any]) -> int:
    """The peak memory that `decode_loss` with these arguments and its backward pass would add.

    Counts the gradients of the parameters, not the parameters. Only shapes and dtypes matter, so
    tensors and modules may be on the meta device; the prediction is then for a CPU. A callable cell
    is called on tensors without data, for at most 16 steps. Nothing is computed or drawn, and the
    modules that it names keep their buffers and attributes; other side effects, such as counting
    calls in a list of yours, do happen. A cell that asks for values of tensors is counted as a GRU
    with the cell's weights. A growing state is assumed to grow in every step as in the second.

    Args:
        targets: as in `decode_loss`, or only their shape: (T, B), and (B, T) with `batch_first`.

    All other arguments are those of `decode_loss`.

    Returns:
        The peak in bytes, an int.

    Raises:
        ValueError, TypeError: as `decode_loss`.

    Example:
        >>> peak = accumext.decode_memory(embedding, cell, head, (200, 16), feedback="greedy")
    """
    bools(OP, batch_first=given["batch_first"], return_outputs=given["return_outputs"])
    cell, shape, device = given["cell"], given["targets"], head_weights(OP, given["head"])[0].device

    def on_device(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        return torch.zeros_like(tensor, device=device).requires_grad_(tensor.requires_grad)

    given |= {
        name: map_tensors(on_device, value)
        for name, value in given.items()
        if name not in ("embedding", "cell", "head")
    }
    if isinstance(shape, (tuple, list)):
        given["targets"] = torch.zeros(*shape, dtype=torch.int64, device=device)
    if given["batch_first"]:
        given = steps_first(given)
    if given["truncation"] == "random":  # the same memory, and nothing is drawn
        given |= {"truncation": "fixed", "k2": None}
    copied = 0
    if given["embedding"] is None:
        table, rows = rows_of(given)
        copied = 0 if base_of(table.weight) is base_of(given["inputs"]) else table.weight.nbytes
        given |= {"embedding": table, "inputs": rows}
    call = call_from(given, has_data=False)
    model = call.model
    for name, module in (("embedding", model.table.module), ("head", model.called_head)):
        if module is not None:
            contract = "be computed from its weight, for the memory of a call of it is not known"
            fail_type(OP, name, contract, formula_weights(module) or type_name(module))
    return copied + predicted_peak(call, cell)


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
    d_table = rows * width * (table.requires_grad and not model.tied)
    final = vocabulary * hidden * weight.element_size() * half * weight.requires_grad
    final += d_table * weight.element_size() * half
    d_table *= size

    if model.rnn is None:
        assert segment is not None
        spans, steps = call.truncation.spans(tokens.steps), longest_segment(call)
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
    spans = truncation.spans(tokens.steps)
    longest = max(end - begin for begin, _, end in spans)
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
    elif len(spans) > 1 and truncation.k1 != truncation.k2:
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


def longest_segment(call: Call) -> int:
    """Steps of a callable cell whose graph exists at once, at most."""
    steps, period = call.tokens.steps, call.truncation.period
    spans = call.truncation.spans(steps)
    if len(spans) > 1:
        return max(end - begin for begin, _, end in spans)
    return max(1, min(SEGMENT, steps, period or SEGMENT))


def segment_memory(call: Call, cell: Any) -> SegmentMemory:
    """The memory of a segment of this call.

    Nothing is computed, drawn or written, and the modules that the cell is made of get back what
    their attributes were.
    """
    longest = longest_segment(call)
    late, ahead = call, call.tokens.steps - longest
    try:
        with (
            fake_tensors() as fake, unchanged(_modules(cell)), _own_autocast_cache(),
            torch.enable_grad(), warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")  # the call itself will warn
            state = _grown(call, fake, ahead)
            late = call._replace(tokens=replace(call.tokens, state=state))
            # Two steps at least, of which the second adds to the gradients of the first.
            steps = max(longest, min(2, call.tokens.steps))
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
    if call.plan.bounded or len(call.truncation.spans(steps)) > 1:
        return 0
    return sum(
        end - begin
        for begin, end in segments(steps, call.truncation.period, 1)
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
    peak = longest_segment(call) * graph + weights
    return peak, weights, batch * hidden * size, graph


def _measured(call: Call, fake: Any, steps: int) -> tuple[int, int, int, int]:
    """Bytes of a segment's graph and backward pass, of the gradients that are left, of a state, and
    of a step's graph."""
    state = map_tensors(partial(_copy, requires_grad=True), call.tokens.state)
    run, root, context = _without_data(call, steps)
    d_hidden = root.new_empty(steps, call.tokens.batch, call.model.head_weight.shape[1])

    with Allocations(fake) as memory:
        first = next_node_number()
        segment, last = run.run_steps(0, 0, steps, state, root, *context)
        hidden = segment.hidden
        del segment
        size = sum({id(t.untyped_storage()): t.nbytes for t in tensors(last)}.values())
        if not hidden.requires_grad:
            return memory.peak, 0, size, 0
        kept = [root, *tensors(state)]
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


def _without_data(call: Call, steps: int) -> tuple[CallableSteps, Tensor, list[Tensor]]:
    """Steps to run on tensors without data, the root of the embedding's lookups, the context."""
    model, tokens, table = call.model, call.tokens, call.model.table.weight
    shape = (steps, tokens.batch)
    empty = partial(torch.empty, device=table.device)
    ends = tokens.eos is not None or tokens.within_length is not None
    gate = call.truncation.gate(tokens.steps, tokens.batch, model.head_weight)
    transcript: Any = SimpleNamespace(
        model=model, tokens=tokens, gate=gate, inputs=empty(shape, dtype=torch.int64),
        active=empty(shape, dtype=torch.bool) if ends else None,
    )  # fmt: skip
    root = empty(0, dtype=table.dtype, requires_grad=table.requires_grad)
    context = [_copy(tensor, tensor.requires_grad) for tensor in model.context]
    run = CallableSteps(transcript, None, root, True, call.return_outputs, known=steps)
    return run, root, context


def _grown(call: Call, fake: Any, ahead: int) -> State:
    """The state `ahead` steps later: each adds to it what the second does."""
    given = call.tokens.state
    if ahead < 2:
        return given
    run, root, context = _without_data(call, 1)
    with Allocations(fake), torch.no_grad():
        start = map_tensors(partial(_copy, requires_grad=False), given)
        _, one = run.run_steps(0, 0, 1, start, root, *context)
        _, two = run.run_steps(0, 0, 1, one, root, *context)
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
