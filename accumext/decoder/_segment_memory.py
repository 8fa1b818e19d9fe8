"""What a callable cell keeps in memory: a segment of its steps and their backward pass run on
tensors without data."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from accumext._torch_private import (
    Allocations,
    fake_tensors,
    gradient_hooks,
    is_since,
    leaf_of,
    next_node_number,
    nodes_since,
    unchanged,
)
from accumext.decoder._arguments import DecodeArguments
from accumext.decoder._callable_path import run_steps, segments
from accumext.decoder._memory import SEGMENT, SegmentMemory, keeps_graph, longest_segment
from accumext.recurrence import State, map_tensors, parameter_tensors, tensors

# A cell that does not run without data is taken to be a GRU as torch builds it: tensors of [B, H]
# that the graph of one step keeps, as measured; and its gates, where its weights are not known.
GRAPH, GATES = 10, 3


def segment_memory(args: DecodeArguments, cell: Any) -> SegmentMemory:
    """What a segment of this call has at once.

    Nothing is computed, drawn or written, and the modules that the cell is made of get back what
    their attributes were.
    """
    late, ahead = args, args.steps - longest_segment(args)
    try:
        with (
            fake_tensors() as fake, unchanged(_modules(cell)), _own_autocast_cache(),
            torch.enable_grad(), warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")  # the call itself will warn
            late = replace(args, state=_grown(args, fake, ahead))
            alone = _measured(late, fake, False)
            after_others = _measured(late, fake, True)[0] if ahead > 0 else alone[0]
            first = alone if late.state is args.state else _measured(args, fake, False, 1)
    except Exception:  # whatever a cell raises that asks for values
        alone = first = _like_gru(args)
        after_others = alone[0]
    finally:
        args.table.discard_gradients()
    peak, gradients, state, graph = alone
    kept = _kept_steps(args, first[3], (state - first[2]) // max(1, args.steps - 1))
    graph -= (graph - first[3]) * kept // max(1, 2 * args.steps)  # of those on average
    return SegmentMemory(peak, after_others, gradients, (first[2] + state) // 2, graph, kept)


def _kept_steps(args: DecodeArguments, graph: int, growth: int) -> int:
    """Steps whose graph the path for callables keeps, by the bytes of the first one's and those
    that each adds to the state: see `_Steps.once`."""
    if args.memory_budget is not None or len(args.windows()) > 1:
        return 0
    period = None if args.k2 is None else args.k1
    spans = segments(args.steps, period, SEGMENT, 1)
    return sum(
        end - begin
        for begin, end in spans
        if begin == 0 or keeps_graph(args.steps - begin, graph, growth * (begin - 1))
    )


def _like_gru(args: DecodeArguments) -> tuple[int, int, int, int]:
    """As `_measured`, of a GRU."""
    size = args.dtypes.accumulation.itemsize
    hidden, width = args.head_weight.shape[1], args.table.weight.shape[1]
    graph = args.batch * (GRAPH * hidden + width) * size
    known = sum(p.numel() for p in parameter_tensors(args.cell))
    weights = (known or GATES * hidden * (hidden + width)) * size
    peak = longest_segment(args) * graph + weights
    return peak, weights, args.batch * hidden * size, graph


def _measured(
    args: DecodeArguments, fake: Any, after_others: bool, steps: int | None = None
) -> tuple[int, int, int, int]:
    """Bytes of a segment's graph and backward pass, of the gradients that are left, of a state, and
    of a step's graph.

    After other segments' passes the gradients that these leave are there already.
    """
    steps = longest_segment(args) if steps is None else steps
    state = map_tensors(partial(_copy, requires_grad=True), args.state)
    tokens, anchor, context = _without_data(args, steps)
    d_hidden = anchor.new_empty(steps, args.batch, args.head_weight.shape[1])

    with Allocations(fake) as memory:
        first = next_node_number()
        hidden, last = run_steps(tokens, steps, state, anchor, context)
        size = sum({id(t.untyped_storage()): t.nbytes for t in tensors(last)}.values())
        if not hidden.requires_grad:
            return memory.peak, 0, size, 0
        kept = [anchor, *tensors(state)]
        edges, weights, hooked = _leaves(hidden, first, kept)
        differentiable = [t for t in tensors(last) if t.requires_grad]
        roots = [get_gradient_edge(t) for t in (hidden, *differentiable)]
        del hidden  # the backward pass, which runs the segment again, does not stack its outputs
        graph = memory.now // steps
        gradients = [d_hidden, *map(torch.empty_like, differentiable)]
        for weight in weights if after_others else ():
            # Autograd makes the sum of these two, and adds to it.
            roots += [get_gradient_edge(weight)] * 2
            gradients += [weight.new_empty(()).expand(weight.shape)] * 2
        del last, differentiable
        torch.autograd.grad(roots, edges, gradients, allow_unused=True)
    unseen = sum(weight.nbytes for weight in hooked)
    left = sum(weight.nbytes for weight in weights) + unseen
    return memory.peak + unseen, left, size, graph


def _without_data(args: DecodeArguments, steps: int) -> tuple[Any, Tensor, list[Tensor]]:
    """Tokens, the embedding's anchor and the context for so many steps, in tensors without data."""
    table, shape = args.table.weight, (steps, args.batch)
    empty = partial(torch.empty, device=table.device)
    ends = args.eos is not None or args.within_length is not None
    live = empty(shape, dtype=torch.bool) if ends else None
    tokens = SimpleNamespace(args=args, inputs=empty(shape, dtype=torch.int64), live=live)
    anchor = empty(0, dtype=table.dtype, requires_grad=table.requires_grad)
    return tokens, anchor, [_copy(tensor, tensor.requires_grad) for tensor in args.context]


def _grown(args: DecodeArguments, fake: Any, ahead: int) -> State:
    """The state `ahead` steps later: each adds to it what the second does."""
    if ahead < 2:
        return args.state
    tokens, anchor, context = _without_data(args, 1)
    with Allocations(fake), torch.no_grad():
        start = map_tensors(partial(_copy, requires_grad=False), args.state)
        _, one = run_steps(tokens, 1, start, anchor, context)
        _, two = run_steps(tokens, 1, one, anchor, context)
    before = iter(tensors(one))

    def longer(leaf: Tensor) -> Tensor:
        sizes = zip(next(before).shape, leaf.shape, strict=True)
        return leaf.new_empty([was + (ahead - 1) * (now - was) for was, now in sizes])

    grows = [t.shape for t in tensors(one)] != [t.shape for t in tensors(two)]
    return map_tensors(longer, two) if grows else args.state


def _copy(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The tensor without its data, a leaf."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return torch.empty_like(tensor).requires_grad_(requires_grad and differentiable)


def _leaves(
    output: Tensor, first: int, kept: list[Tensor]
) -> tuple[list[GradientEdge], list[Tensor], list[Tensor]]:
    """Where gradients leave the graph, towards leaves and nodes from before `first`; the leaves but
    for `kept`, of which every segment has its own; and apart from both, leaves with hooks, which
    would be called.
    """
    edges: list[GradientEdge] = []
    leaves: list[Tensor] = []
    hooked: list[Tensor] = []
    outward = {
        (node, index)
        for inner in nodes_since(first, [output])
        for node, index in inner.next_functions
        if node is not None and not is_since(node, first)
    }
    for node, index in outward:
        leaf = leaf_of(node)
        if leaf is not None and gradient_hooks(leaf)[0]:
            hooked.append(leaf)
            continue
        edges.append(GradientEdge(node, index))
        if leaf is not None and not any(leaf is tensor for tensor in kept):
            leaves.append(leaf)
    return edges, leaves, hooked


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
