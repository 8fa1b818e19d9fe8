"""`decode_memory`: a prediction of the peak memory of `decode_loss`.

The memory of a callable cell is measured: a segment of its steps and their backward pass run on
tensors without data.
"""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from accumext.decoder._call import Call, call_from, steps_first
from accumext.decoder._callable import CallableSteps, segments_of
from accumext.decoder._decode_loss import decode_loss
from accumext.decoder._model import OP, Model, head_weights
from accumext.decoder._module_calls import formula_weights
from accumext.decoder._observations import rows_of
from accumext.decoder._parameters import with_parameters_of
from accumext.decoder._plan import PRE_ACTIVATION_DEVICES, PRE_ACTIVATIONS, SEGMENT, keeps_graph
from accumext.decoder._rnn_weights import GRU, LSTM, RNN_RELU, RNN_TANH, RnnWeights
from accumext.recurrence import KeptState, Replay, State, map_tensors, parameter_tensors, tensors
from accumext.tensors.argument_names import explained
from accumext.tensors.checks import bools, fail_type, type_name
from accumext.tensors.torch_private import (
    Allocations,
    base_of,
    fake_tensors,
    is_since,
    leaf_of,
    next_node_number,
    nodes_since,
    unhooked,
)

# Rows whose known inputs torch's modules multiply at once.
INPUT_ROWS = {"cpu": 512, "cuda": 2048}

# Units per row, [rows, H] each, in the backward pass of torch's modules: gradients alone if the
# forward pass has kept pre-activations, and else the gates' products and pre-activations as well.
BACKWARD_UNITS = {GRU: 10, LSTM: 8, RNN_TANH: 1, RNN_RELU: 1}
GRADIENT_UNITS = {GRU: 6, LSTM: 4, RNN_TANH: 1, RNN_RELU: 1}

# Units per row and gate that cuDNN reserves in a layer for its backward pass, beside two: by the
# peaks of nn.LSTM and nn.GRU on an H100 (bench/results/loops_h100.json).
CUDNN_UNITS = 3

# A cell that does not run without data is counted as a GRU in plain PyTorch: the number of [B, H]
# tensors that the graph of one step keeps, as measured, and of gates if its weights are not known.
GRAPH, GATES = 10, 3


@explained
@with_parameters_of(decode_loss)
def decode_memory(args: dict[str, Any]) -> int:
    """Return the peak memory that `decode_loss` with these arguments and its backward would add.

    Counts the gradients of the parameters, not the parameters. Only shapes and dtypes matter, so
    tensors and modules may be on the meta device; the prediction is then for a CPU. A callable cell
    is called on tensors without data, for at most 16 steps. Nothing is computed or drawn, and the
    modules that it uses keep their buffers and attributes; other side effects, such as writing to
    a file, do happen. A cell that asks for values of tensors is counted as a GRU with the cell's
    weights. A growing state is assumed to grow in every step as in the second.

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
    bools(OP, batch_first=args["batch_first"], return_outputs=args["return_outputs"])
    shape, device = args["targets"], head_weights(OP, args["head"])[0].device

    def on_device(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        return torch.zeros_like(tensor, device=device).requires_grad_(tensor.requires_grad)

    others = args.keys() - {"embedding", "cell", "head"}  # which may be trees that have no copy
    args = {**args, **{name: map_tensors(on_device, args[name]) for name in others}}
    if isinstance(shape, (tuple, list)):
        args["targets"] = torch.zeros(*shape, dtype=torch.int64, device=device)
    if args["batch_first"]:
        args = steps_first(args)
    if args["truncation"] == "random":  # the same memory, and nothing is drawn
        args |= {"truncation": "fixed", "k2": None}
    copied = 0
    if args["embedding"] is None:
        table, rows = rows_of(args)
        copied = 0 if base_of(table.weight) is base_of(args["inputs"]) else table.weight.nbytes
        args |= {"embedding": table, "inputs": rows}
    call = call_from(args, has_data=False)
    for name, module in (("embedding", call.model.table.module), ("head", call.model.called_head)):
        if module is not None:
            contract = "be computed from its weight, for the memory of a call of it is not known"
            fail_type(OP, name, contract, formula_weights(module) or type_name(module))
    return copied + predicted_peak(call)


def predicted_peak(call: Call) -> int:
    """Return the peak bytes of a call and its backward pass, with gradients of the parameters.

    It is reached at the end of the head's pass, with the workspace; in the pass back through the
    cell; or after it, with the embedding's gradient. Main gradients that take the place of the
    parameters' gradients are counted as such.
    """
    model, tokens, plan, rnn = call.model, call.tokens, call.plan, call.model.rnn
    weight, product, soft = model.head_weight, model.dtypes.product, call.objective.soft
    size, count = model.dtypes.accumulation.itemsize, tokens.steps * tokens.batch
    vocabulary, hidden = weight.shape
    if rnn is None:
        states, kept, backward = _callable_cell(call)
    else:
        states, kept, backward = (_cell_at_once if call.at_once else _torch_cell)(call, rnn)

    # Of the whole call: tokens, inputs, targets, losses and masks, and the head's gradients.
    bias = model.head_bias is not None and model.head_bias.requires_grad
    head = vocabulary * size * (hidden * weight.requires_grad + bias) + count * hidden * size
    drawn = 8 * tokens.feedback.samples + size * (call.objective.token_weight is not None)
    always = count * (5 * 8 + size + 2 + drawn) + head + states
    # Of the forward pass: the workspace, logits, and what goes through the head. Soft targets of
    # all words add a teacher's logits, or its probabilities, to the logits.
    logits = 1 if soft is None or soft.indices is not None else 2
    passing = logits * vocabulary * plan.logit_rows * size + 3 * plan.rows * hidden * size
    # The cell's outputs, and the weight's rows of the targets, in the dtype of products as well.
    passing += 2 * plan.rows * hidden * product.itemsize * (product.itemsize < size)
    if not plan.gradients_in_forward:  # all rows at once, their places, targets and factors
        passing += count * (hidden * size + 5 * 8 + 2 * size)
    if rnn is not None and not tokens.free_running and not call.at_once:
        read = 8 + size  # indices, losses
        if tokens.within_length is not None:  # rows that count are copied, in case some do not
            read += hidden * size + 2 * 8 + size + 1
        passing = max(passing + count * read, _known_inputs(call, rnn))
    forward = vocabulary * plan.rows * model.dtypes.exps.itemsize + passing + kept
    forward += vocabulary * hidden * product.itemsize * (product != weight.dtype)
    returned = count * hidden * size * call.return_outputs  # of torch's modules, after the pass
    copied = returned * tokens.rows_may_end  # those that have ended are zeroed in a copy
    return always + max(forward + returned * (rnn is None), returned + max(copied, backward))


def _torch_cell(call: Call, rnn: RnnWeights) -> tuple[int, int, int]:
    """Return what `_callable_cell` returns, of torch's modules. That of the backward pass is the
    larger of its largest piece of steps and of the gradients in half precision at its end."""
    model, tokens, size = call.model, call.tokens, call.model.dtypes.accumulation.itemsize
    width, units, operands = model.table.weight.shape[1], rnn.units, model.dtypes.cell
    state = rnn.state_parts * rnn.layers * tokens.batch * units * size
    masked = (rnn.layers - 1) * units * (rnn.dropout > 0)
    masked += width * (model.embedding_dropout > 0) + units * (model.output_dropout > 0)
    given = [w for w in rnn.weights if w is not None]
    casts = sum(w.numel() for w in given if w.dim() == 2 and w.dtype != operands)
    pre_activations = call.plan.pre_activation_bytes
    states = state * (tokens.steps + 3)  # T + 1, the given one and the one returned
    states += tokens.steps * tokens.batch * masked + pre_activations + casts * operands.itemsize

    gradients, spans = GRADIENT_UNITS[rnn.kind] * units, call.truncation.spans(tokens.steps)
    formed = gradients if pre_activations else BACKWARD_UNITS[rnn.kind] * units
    if operands.itemsize < size:  # half-precision operands of the weights' gradients
        rounded = rnn.gates * units + max(units, width)
        gradients += rounded * operands.itemsize // size
    row = max(formed, gradients) + width
    if model.embedding_dropout > 0:  # the gradient of the cell's input, the mask, their product
        row = max(row, rnn.gates * units + 3 * width)
    if rnn.layers > 2:  # the gradient of the inputs of a layer between two others
        row = max(row, formed + units)
    # The gradient of the inputs of the layer above; of the outputs, after dropout; and a copy of
    # that, if windows overlap.
    row += units * ((rnn.layers > 1 or len(spans) > 1) + (model.output_dropout > 0))
    steps = min(max(end - begin for begin, _, end in spans), call.plan.backward_steps)
    # Two gradients of the state: that of a window, and the sum over windows.
    left = sum(w.numel() for w in given) * size + 2 * state
    if model.device.type not in PRE_ACTIVATION_DEVICES:  # weight_hh, transposed
        left += sum(w.numel() for w in rnn.weights[1::4] if w is not None) * operands.itemsize
    trained, rounded_size = _table_size(model), model.head_weight.element_size()
    final = model.head_weight.numel() * model.head_weight.requires_grad + trained
    final = (final * rounded_size + sum(w.nbytes for w in given)) * (rounded_size < size)
    return states, 0, trained * size + left + max(steps * tokens.batch * row * size, final)


def _cell_at_once(call: Call, rnn: RnnWeights) -> tuple[int, int, int]:
    """Return what `_callable_cell` returns, of a module whose steps cuDNN runs at once."""
    model, count, table = call.model, call.tokens.steps * call.tokens.batch, call.model.table.weight
    (width, units), product = (table.shape[1], rnn.units), model.dtypes.product
    narrow = product.itemsize * (product.itemsize < model.dtypes.accumulation.itemsize)
    # Inputs, outputs and what cuDNN reserves; with dropout, what it keeps and their masks as well.
    row = (width + units + rnn.layers * units * (CUDNN_UNITS * rnn.gates + 2)) * product.itemsize
    dropped = width * (model.embedding_dropout > 0) + units * (model.output_dropout > 0)
    row += dropped * (product.itemsize + 1)
    copied = product != table.dtype or not rnn.stacked
    weights = sum(w.numel() for w in rnn.given)
    states = count * row + weights * product.itemsize * copied
    # Gradients of weights, outputs and looked-up rows; then of the rows, twice, and the table.
    gradients = sum(w.nbytes for w in rnn.given) + count * width * table.element_size()
    through = gradients + count * (width + units) * narrow + weights * narrow
    trained, size = _table_size(model), model.dtypes.accumulation.itemsize
    rounded = table.element_size() * (table.element_size() < size)
    joined = gradients + count * width * table.element_size() + trained * (size + rounded)
    joined += model.head_weight.numel() * model.head_weight.requires_grad * rounded
    return states, 0, max(through, joined - states)


def _table_size(model: Model) -> int:
    """Return the elements of the embedding's gradient; 0 if it shares that of the head."""
    return model.table.weight.numel() * (model.table.weight.requires_grad and not model.tied)


def _known_inputs(call: Call, rnn: RnnWeights) -> int:
    """Return the peak bytes of the forward pass through the layers if the inputs are known."""
    model, tokens, device = call.model, call.tokens, call.model.device.type
    rows = INPUT_ROWS.get(device, INPUT_ROWS["cpu"])
    steps = min(tokens.steps, max(1, rows // max(1, tokens.batch)))
    inputs = (model.table.weight.shape[1] + rnn.units) * model.dtypes.cell.itemsize
    products = rnn.gates
    if rnn.gates > 1 and device in PRE_ACTIVATION_DEVICES:
        products = 0 if call.plan.pre_activation_bytes else PRE_ACTIVATIONS
    size = model.dtypes.accumulation.itemsize
    return steps * tokens.batch * (inputs + products * rnn.units * size)


class SegmentMemory(NamedTuple):
    """Bytes of a segment of a callable cell: the steps whose graph exists at once."""

    alone: int  # the graph and its backward pass, with the gradients of parameters and context
    gradients: int  # of parameters and context, which remain after the backward pass
    state: int  # after the segment
    graph: int  # of one step
    saved: int = 0  # of the graph of the call's first step, as the call measures it


def _callable_cell(call: Call) -> tuple[int, int, int]:
    """Return the bytes that the cell and the embedding take: until the end; of the graph that the
    forward pass keeps; and in the backward pass, beside the first and the head's gradients.

    Kept until the end are outputs and the states between segments. The backward pass goes back
    through the segments; then the rows of all lookups are joined.
    """
    model, tokens, longest = call.model, call.tokens, longest_segment(call)
    table, weight, steps = model.table.weight, model.head_weight, call.tokens.steps
    first, last = segment_memory(call, longest)
    growth = (last.state - first.state) / max(1, steps - 1)  # bytes of the state in a step
    with_graph = kept_spans(call, first.saved, growth)
    looked_up = tokens.batch * table.shape[1] * table.element_size() * table.requires_grad
    windows = call.truncation.spans(steps)
    parts = [(begin, end) for begin, _, end in windows]
    if len(windows) == 1:
        parts = segments_of(call.truncation, steps, measures=not call.plan.bounded)

    def state_after(end: int) -> int:
        return int(first.state + growth * (end - 1))

    # The graph of a step grows with the state, from the first step's on.
    slope = (last.graph - first.graph) / max(1, steps - longest / 2)
    lookups = looked_up * sum(end - begin for begin, end in parts)
    kept, between, peak, later = 0, 0, 0, lookups
    for begin, end in parts:
        graph = int((end - begin) * (first.graph + slope * (begin + end) / 2))
        later -= looked_up * (end - begin)
        if (begin, end) in with_graph:
            kept, graph = kept + graph, 0
        elif begin > 0:
            between += state_after(begin)
        # Beside graphs: gradients, that of the state, and what the pass back computes.
        beside = last.alone - longest * last.graph + (state_after(end) if end < steps else 0)
        peak = max(peak, kept + between + graph + later + beside)
    hidden = steps * tokens.batch * weight.shape[1]
    # If all tokens are known, the head reads steps whose graph is kept at once: their places,
    # tokens and losses.
    with_graph_steps = sum(end - begin for begin, end in with_graph)
    at_once = longest if tokens.rows_may_end or growth else max(longest, with_graph_steps)
    rows = 0 if tokens.free_running else at_once * tokens.batch
    read_at_once = rows * (3 * 8 + model.dtypes.accumulation.itemsize)
    if at_once > longest and call.plan.rows >= 2 * tokens.batch:  # joined with the first step's
        read_at_once += rows * weight.shape[1] * weight.element_size()
    sums = _table_size(model) - hidden
    joined = last.gradients + 2 * lookups + sums * model.dtypes.accumulation.itemsize
    states = hidden * weight.element_size() + between
    return states, kept + read_at_once, max(peak, joined) - states


def longest_segment(call: Call) -> int:
    """Return the largest number of steps of a callable cell whose graph exists at once."""
    steps, period = call.tokens.steps, call.truncation.period
    spans = call.truncation.spans(steps)
    if len(spans) > 1:
        return max(end - begin for begin, _, end in spans)
    return max(1, min(SEGMENT, steps, period or SEGMENT))


def kept_spans(call: Call, graph: int, growth: float) -> list[tuple[int, int]]:
    """Return the steps [begin, end) whose graph `CallableSteps` keeps. They depend on the bytes of
    the first step's graph, and on those that each step adds to the state."""
    steps = call.tokens.steps
    if call.plan.bounded or len(call.truncation.spans(steps)) > 1:
        return []
    return [
        (begin, end)
        for begin, end in segments_of(call.truncation, steps, measures=True)
        if begin == 0 or keeps_graph(begin, steps, graph, int(growth * (begin - 1)))
    ]


def segment_memory(call: Call, longest: int) -> tuple[SegmentMemory, SegmentMemory]:
    """Return the memory of the first segment and of the last one, whose state may be larger.

    Nothing is computed or drawn, and what the cell keeps is put back.
    """
    cell = KeptState(OP, "cell", (call.model.cell.step,))
    before = cell.save(graphs=True)
    torch.clear_autocast_cache()  # or tensors without data would be mixed with rounded weights
    try:
        with fake_tensors() as fake, torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the call itself will warn
            given, steps = call.tokens.state, call.tokens.steps
            state = _grown(call, fake, steps - longest)
            # At least two steps, for the second step's gradients are added to the first step's.
            last = _measured(call, state, fake, max(longest, min(2, steps)))
            first = last if state is given else _measured(call, given, fake, 1)
            return first._replace(saved=_saved_at_first(call, fake)), last
    except Exception:  # a cell that asks for values of tensors may raise anything
        return (_like_gru(call, longest),) * 2
    finally:
        cell.restore(before)
        torch.clear_autocast_cache()
        call.model.table.discard_gradients()


def _like_gru(call: Call, longest: int) -> SegmentMemory:
    """Return what `_measured` returns, computed for a GRU."""
    model, batch = call.model, call.tokens.batch
    size = model.dtypes.accumulation.itemsize
    hidden, width = model.head_weight.shape[1], model.table.weight.shape[1]
    graph = batch * (GRAPH * hidden + width) * size
    known = sum(p.numel() for p in parameter_tensors(model.cell))
    weights = (known or GATES * hidden * (hidden + width)) * size
    state = batch * hidden * size
    return SegmentMemory(longest * graph + weights, weights, state, graph, graph)


def _measured(call: Call, state: State, fake: Any, steps: int) -> SegmentMemory:
    """Measure the memory of a segment of so many steps from a state."""
    state = map_tensors(partial(_copy, requires_grad=True), state)
    run = _without_data(call, steps)
    d_hidden = run.anchor.new_empty(steps, call.tokens.batch, call.model.head_weight.shape[1])

    with Allocations(fake) as memory:
        first = next_node_number()
        segment, last = run.run_steps(0, 0, steps, state)
        hidden = segment.hidden
        del segment
        size = sum({id(t.untyped_storage()): t.nbytes for t in tensors(last)}.values())
        if not hidden.requires_grad:
            return SegmentMemory(memory.peak, 0, size, 0)
        # The edges to leaves and to nodes older than this graph: gradients leave the graph there.
        edges = {
            GradientEdge(node, index)
            for inner in nodes_since(first, [hidden])
            for node, index in inner.next_functions
            if node is not None and not is_since(node, first)
        }
        own = {id(t) for t in (run.anchor, *tensors(state))}  # every segment has its own
        leaves = (leaf_of(edge.node) for edge in edges)
        weights = [leaf for leaf in leaves if leaf is not None and id(leaf) not in own]
        differentiable = [t for t in tensors(last) if t.requires_grad]
        roots = [get_gradient_edge(t) for t in (hidden, *differentiable)]
        del hidden  # the backward pass, which runs the segment again, does not stack its outputs
        graph = memory.now // steps
        gradients = [d_hidden, *map(torch.empty_like, differentiable)]
        del last, differentiable
        with unhooked(weights):
            torch.autograd.grad(roots, list(edges), gradients, allow_unused=True)
    return SegmentMemory(memory.peak, sum(w.nbytes for w in weights), size, graph)


def _saved_at_first(call: Call, fake: Any) -> int:
    """Return the bytes of the first step's graph as the call measures them. The graph's other steps
    also hold the state that they read, and outputs that nothing has saved."""
    replay = Replay(KeptState(OP, "cell", (call.model.cell.step,)), call.model.device, False)
    state = map_tensors(lambda tensor: _copy(tensor, tensor.requires_grad), call.tokens.state)
    run = _without_data(call, 1)
    with Allocations(fake), replay.measuring(run.context) as sizes:
        segment = run.run_steps(0, 0, 1, state)
    del segment
    return sum(sizes.values())


def _without_data(call: Call, steps: int) -> CallableSteps:
    """Return steps that run on tensors without data."""
    model, tokens, table = call.model, call.tokens, call.model.table.weight
    shape = (steps, tokens.batch)
    empty = partial(torch.empty, device=table.device)
    gate = call.truncation.gate(tokens.steps, tokens.batch, model.head_weight)
    transcript: Any = SimpleNamespace(
        model=model, tokens=tokens, gate=gate, inputs=empty(shape, dtype=torch.int64),
        active=empty(shape, dtype=torch.bool) if tokens.rows_may_end else None,
    )  # fmt: skip
    anchor = empty(0, dtype=table.dtype, requires_grad=table.requires_grad)
    context = tuple(_copy(tensor, tensor.requires_grad) for tensor in model.context)
    return CallableSteps(transcript, None, anchor, context, True, call.return_outputs, known=steps)


def _grown(call: Call, fake: Any, ahead: int) -> State:
    """Return the state `ahead` steps later, if every step makes it grow as the second does."""
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
    """Return a leaf like the tensor, without its data."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return torch.empty_like(tensor).requires_grad_(requires_grad and differentiable)
