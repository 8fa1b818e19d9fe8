"""The path for callable cells: autograd differentiates the cell, in segments that the backward pass
runs again, but for the last steps, whose graph is kept; head and loss are one node of the graph
after the cell's outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accumext._checks import check_first_order, message
from accumext._torch_private import base_of, leaves_since, next_node_number, write_count
from accumext.decoder._arguments import OP, DecodeArguments
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, NeedsGrad, cast_like
from accumext.decoder._memory import keeps_graph, workspace_plan
from accumext.decoder._operators import all_ended
from accumext.decoder._saved_for_backward import SavedForBackward
from accumext.decoder._token_buffers import Decoded, TokenBuffers
from accumext.recurrence import (
    State,
    check_output,
    check_unwritten,
    detach,
    freeze,
    join,
    map_tensors,
    no_grad_no_autocast,
    parameter_tensors,
    replay_rng,
    rng_state,
    size_of,
    tensors,
    write_counts,
)


def decode_with_callable(tokens: TokenBuffers) -> Decoded:
    """What comes of a call whose cell is called."""
    args, grad_enabled = tokens.args, torch.is_grad_enabled()
    reached = [args.table.weight, *tensors(args.state), *parameter_tensors(args.cell)]
    differentiable = args.cell.state_shapes is None or any(t.requires_grad for t in reached)
    plan = workspace_plan(args)
    needs = None
    if grad_enabled and args.head_gradients_in_forward:
        bias_grad = args.head_bias is not None and args.head_bias.requires_grad
        needs = NeedsGrad(differentiable, args.head_weight.requires_grad, bias_grad)
    with no_grad_no_autocast(tokens.losses.device):
        cross_entropy = FusedCrossEntropy(args, plan, needs)
    anchor = args.table.anchor()
    builds_graph = grad_enabled and differentiable
    steps = _Steps(args, tokens, cross_entropy, anchor, plan.segment, builds_graph)
    if args.k2 is None or args.k1 == args.k2 or not builds_graph:
        segments, last = steps.once(args.state)
    else:
        segments, last = steps.overlapping(args.state)
    steps.cross_entropy = None
    outputs = None
    if args.return_outputs:
        outputs = torch.cat([s.hidden if s.outputs is None else s.outputs for s in segments])
    extras = join(OP, torch.cat, [s.extras for s in segments])
    with no_grad_no_autocast(tokens.losses.device):
        gradients = cross_entropy.finish()
        value, inverse_divisor = tokens.reduced_loss()
    if not grad_enabled:
        return Decoded(value, last, outputs, extras)
    saved = SavedForBackward(tokens, plan, inverse_divisor, gradients, steps.used)
    loss: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
        saved, value, args.head_weight, args.head_bias, anchor, *(s.hidden for s in segments)
    )
    return Decoded(loss, last, outputs, extras)


class _Segment(NamedTuple):
    """What some steps leave."""

    hidden: Tensor  # [n, B, H]: what the head reads
    outputs: Tensor | None  # [n, B, H] of the cell, if they are asked for and are others
    extras: State  # tensors [n, ...]


def _silent(segment: _Segment, steps: int) -> _Segment:
    """What steps leave once no row is live: zeros, without a call of the cell."""

    def zeros(leaf: Tensor) -> Tensor:
        return leaf.new_zeros(steps, *leaf.shape[1:])

    outputs = None if segment.outputs is None else zeros(segment.outputs)
    return _Segment(zeros(segment.hidden), outputs, map_tensors(zeros, segment.extras))


@dataclass
class _Steps:
    """Runs steps of the cell, for their outputs, states and tokens."""

    args: DecodeArguments
    tokens: TokenBuffers
    cross_entropy: FusedCrossEntropy | None  # None in the backward pass
    anchor: Tensor
    segment: int  # steps of the longest segment
    builds_graph: bool
    known: int = 0  # steps whose tokens are known; later passes over them are replays

    def __post_init__(self) -> None:
        self._first_node = next_node_number() if self.builds_graph else 0
        # The cell's trained parameters and the other leaves in the graph of its first step, and how
        # often each had been written when the steps began.
        self.used = [(p, write_count(p)) for p in parameter_tensors(self.args.cell)]
        self._knows_graph = False

    def once(self, state: State) -> tuple[list[_Segment], State]:
        """Every step once: k2 is None, or k1 = k2, where the state is detached every k1 steps.

        The graph of the first step is measured and kept; so is that of as many of the last steps
        as are small: the backward pass has freed it when it runs the other steps again.
        """
        args, found = self.args, []
        period, steps = args.k1 if args.k2 is not None else None, args.steps
        measures = self.builds_graph and args.memory_budget is None
        graph = size = 0  # bytes of the first step's graph, and of the state after it
        for begin, end in segments(steps, period, self.segment, 1 if measures else 0):
            if begin == 0 and measures:
                given = (0, 0, end, state, self.anchor, *args.context)
                with measured_graph(args.context) as sizes:
                    segment, state = self._run_steps(*given)
                graph, size = sum(sizes.values()), size_of(state)
            elif measures and keeps_graph(steps - begin, graph, size_of(state) - size):
                segment, state = self._run_steps(
                    begin, begin, end, state, self.anchor, *args.context
                )
            else:
                segment, state = self._run_segment(begin, begin, end, state)
            found.append(segment)
            if period is not None and end % period == 0:
                state = detach(state)
            live = self.tokens.live
            if live is not None and end < steps and all_ended(live[end]):
                found.append(_silent(segment, steps - end))
                break
        return found, detach(state) if args.truncated else state

    def overlapping(self, state: State) -> tuple[list[_Segment], State]:
        """k1 < k2: the losses of each window flow back k2 steps from its end (`_windows.windows`).

        The windows overlap, so one pass without a graph finds the tokens and the states where
        windows begin, and each window's graph then starts from its own detached state.
        """
        windows = self.args.windows()
        device, draws = self.tokens.losses.device, self.args.draws
        starts: dict[int, tuple[State, tuple[Tensor, ...] | None]] = {}
        last = state
        borders = [*sorted({begin for begin, _, _ in windows}), self.args.steps]
        with torch.no_grad():
            for border, following in pairwise(borders):
                kept = map_tensors(torch.clone, last)  # a cell may write into its own later
                starts[border] = (kept, rng_state(device) if draws else None)
                for first, stop in segments(following - border, None, self.segment):
                    begin, end = border + first, border + stop
                    _, last = self._run_segment(begin, begin, end, last)
        starts[0] = (state, starts[0][1])  # with its graph: windows from step 0 reach the encoder
        found = []
        for begin, counting, end in windows:
            start, drawn = starts[begin]
            with replay_rng(drawn, device):
                segment, _ = self._run_segment(begin, counting, end, start)
            found.append(segment)
        return found, detach(last)

    def _run_segment(
        self, begin: int, counting: int, end: int, state: State
    ) -> tuple[_Segment, State]:
        """What steps [counting, end) leave, and the state after them.

        The graph holds only the inputs of the segment: the backward pass runs its steps again.
        """
        given = (begin, counting, end, state, self.anchor, *self.args.context)
        if not (self.builds_graph and torch.is_grad_enabled()):
            return self._run_steps(*given)
        found: tuple[_Segment, State] = checkpoint(
            self._run_steps, *given, use_reentrant=False, preserve_rng_state=self.args.draws
        )
        return found

    def _run_steps(
        self, begin: int, counting: int, end: int, state: State, anchor: Tensor, *context: Tensor
    ) -> tuple[_Segment, State]:
        args, tokens, batch_dim = self.args, self.tokens, self.args.cell.batch_dim
        hiddens, outputs, extras = [], [], []
        returned: list[Tensor] = []
        counts: list[int] = []
        known = None
        if not args.free_running:
            embedded = args.table.lookup(anchor, tokens.inputs[begin:end].flatten())
            known = torch.unsafe_split(embedded, args.batch)  # no views: a cell may write into them
        for step in range(begin, end):
            if known is None:
                x = args.table.lookup(anchor, tokens.inputs[step])
            else:
                x = known[step - begin]
            x = dropped(x, args.embedding_dropout)
            if args.resets is not None:
                state = args.resets.apply(OP, step, tokens.live, state, args.state, batch_dim)
            state = args.gate.attach(step, state, batch_dim)
            output, new_state, more = self._call(x, state, context)
            check_output(OP, output, args.batch, args.head_weight.shape[1])
            if not self._knows_graph and torch.is_grad_enabled():
                self._knows_graph = True
                leaves = leaves_since(self._first_node, [output, *tensors(new_state)])
                self.used += [(leaf, write_count(leaf)) for leaf in leaves]
            if not torch.is_grad_enabled():  # a cell may return the same memory at every step
                output, more = output.clone(), map_tensors(torch.clone, more)
            if tokens.live is not None:
                live = tokens.live[step].clone()  # later rows are written, and the graph keeps this
                new_state = freeze(OP, live, new_state, state, batch_dim)
            state = new_state
            hidden = dropped(output, args.output_dropout)
            if step >= counting:
                hiddens.append(hidden)
                outputs.append(output)
                extras.append(more if args.return_outputs else detach(more))
                given = [output, *tensors(more)]
                returned += given
                counts += write_counts(given)
            if args.free_running and step >= self.known:
                self._predict(step, step + 1, hidden)
                tokens.feed_back(step)
        check_unwritten(OP, "cell", "no output or extras of an earlier step", returned, counts)
        joined = torch.stack(hiddens)
        if end > self.known:
            self._predict(begin, end, joined.flatten(0, 1))
        differ = args.return_outputs and args.output_dropout > 0
        raw = torch.stack(outputs) if differ else None
        return _Segment(joined, raw, join(OP, torch.stack, extras)), state

    def _call(
        self, x: Tensor, state: State, context: tuple[Tensor, ...]
    ) -> tuple[Tensor, State, State]:
        """A step of the cell, which may not write into tensors that are read again: by a replay of
        the step, or for rows that stay as they were."""
        args = self.args
        if not (self.builds_graph or self.tokens.live is not None or args.resets is not None):
            return args.cell.step(x, state, *context)
        if torch.is_inference_mode_enabled():  # its tensors count no writes
            output, state, more = args.cell.step(x, map_tensors(torch.clone, state), *context)
            return output, map_tensors(torch.clone, state), more
        given = [*tensors(state), *(context if self.builds_graph else ())]
        counts = write_counts(given)
        result = args.cell.step(x, state, *context)
        check_unwritten(OP, "cell", "no tensor of its state or context", given, counts)
        return result

    def _predict(self, begin: int, end: int, hidden: Tensor) -> None:
        assert self.cross_entropy is not None  # every token is known before the backward pass
        with no_grad_no_autocast(hidden.device):
            self.tokens.predict(self.cross_entropy, begin, end, hidden.detach())
        self.known = end


def dropped(x: Tensor, rate: float) -> Tensor:
    """x with elements dropped at this rate, the others scaled."""
    return F.dropout(x, rate) if rate > 0 else x


@contextmanager
def measured_graph(shared: tuple[Tensor, ...]) -> Iterator[dict[int, int]]:
    """The bytes of each storage kept by a graph made in this context, but for those of leaves, of
    views of them, and of `shared` tensors."""
    sizes: dict[int, int] = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        storage = tensor.untyped_storage()
        if not base_of(tensor).is_leaf and storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        # An output that its own node keeps would keep itself alive.
        return tensor.detach(), write_count(tensor)

    def unpack(saved: tuple[Tensor, int]) -> Tensor:
        """As autograd does where there are no hooks, an error for what has been written since."""
        tensor, writes = saved
        if write_count(tensor) != writes:
            contract = "be those of the forward pass until the backward pass has run"
            raise RuntimeError(message(OP, "tensors that the cell reads", contract, "changed ones"))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield sizes


def run_steps(
    tokens: TokenBuffers, steps: int, state: State, anchor: Tensor, context: list[Tensor]
) -> tuple[Tensor, State]:
    """What the head reads, [steps, B, H], of the first steps, whose tokens are known, and the state
    after them, with a graph; as the backward pass of a segment runs it again."""
    cell = _Steps(tokens.args, tokens, None, anchor, steps, True, known=steps)
    segment, last = cell._run_steps(0, 0, steps, state, anchor, *context)
    return segment.hidden, last


def segments(
    steps: int, period: int | None, longest: int, first: int = 0
) -> Iterator[tuple[int, int]]:
    """[begin, end) over the steps, at most `longest` long, with borders at multiples of `period`;
    the first has `first` steps, if that is given."""
    begin = 0
    while begin < steps:
        end = min(begin + (first if first and begin == 0 else longest), steps)
        if period is not None:
            end = min(end, begin - begin % period + period)
        yield begin, end
        begin = end


class HeadLoss(torch.autograd.Function):
    """The loss as a function of the head's parameters and the cell's outputs.

    Its value and, as a rule, its gradients are known when it is applied. The embedding's anchor is
    an argument, so that the anchor's backward runs even if no gradient reaches any lookup.
    """

    @staticmethod
    def forward(
        ctx: Any,
        saved: SavedForBackward,
        value: Tensor,  # 0-dim or [T, B]
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        *hiddens: Tensor,  # [steps, B, H] each
    ) -> Tensor:
        ctx.saved = saved
        ctx.save_for_backward(*hiddens)
        ctx.layout = [(hidden.shape, hidden.dtype) for hidden in hiddens]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order(OP)
        saved: SavedForBackward = ctx.saved
        args = saved.args
        saved.check_unchanged()
        args.table.discard_gradients()
        args.gate.begin_backward(upstream)
        needs_weight, needs_bias, needs_anchor = ctx.needs_input_grad[2:5]
        needs_hidden = ctx.needs_input_grad[5:]
        hiddens = [h.flatten(0, 1) for h in ctx.saved_tensors] if saved.needs_outputs else []
        with no_grad_no_autocast(upstream.device):
            needs = NeedsGrad(any(needs_hidden), needs_weight, needs_bias)
            gradients, main = saved.head_gradients(upstream, hiddens, needs, not args.tied)
        weight = gradients.weight if needs_weight and main is None else None
        if weight is not None and args.tied:
            # One buffer for both: the rows of the lookups are added to the head's gradient.
            args.table.tied_gradient, weight = weight, None
        d_hiddens: list[Tensor | None] = []
        done = 0
        for (shape, dtype), needed in zip(ctx.layout, needs_hidden, strict=True):
            rows = slice(done, done + shape[0] * shape[1])
            done = rows.stop
            d_hiddens.append(gradients.hidden[rows].view(shape).to(dtype) if needed else None)
        return (
            *(None, None),
            cast_like(weight, args.head_weight),
            cast_like(gradients.bias if needs_bias else None, args.head_bias),
            args.table.weight.new_zeros(0) if needs_anchor else None,
            *d_hiddens,
        )
