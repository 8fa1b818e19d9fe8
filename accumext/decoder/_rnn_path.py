"""The path for torch's recurrent modules: steps forward and backward are operators on the weights,
and everything that need not wait for the next step is batched.

`RnnDecode` is the node of the graph; `_ForwardSteps` and `_ThroughTime` are its two passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from accumext._wgrad_fusion import Destination
from accumext.decoder import _operators
from accumext.decoder._cuda_graph import StepBuffers, WindowGraph
from accumext.decoder._fused_cross_entropy import (
    FusedCrossEntropy,
    NeedsGrad,
    no_grad_no_autocast,
    rows_contiguous,
)
from accumext.decoder._memory import backward_steps, workspace_plan
from accumext.decoder._recurrent_state import State
from accumext.decoder._rnn_weights import GATES, GRU, RnnWeights, pre_activations
from accumext.decoder._saved_for_backward import (
    SavedForBackward,
    formed_in_forward,
    table_destination,
)
from accumext.decoder._token_buffers import TokenBuffers


def decode_with_rnn(tokens: TokenBuffers, rnn: RnnWeights) -> tuple[Tensor, State]:
    """The loss and the last state of a call whose cell the operators run."""
    args = tokens.args
    parts = list(args.state) if rnn.state_parts == 2 else [args.state]
    loss, *last = RnnDecode.apply(  # type: ignore[no-untyped-call]
        tokens,
        rnn,
        torch.is_grad_enabled(),
        args.head_weight,
        args.head_bias,
        args.table.weight,
        *parts,
        *[w for w in rnn.weights if w is not None],
    )
    return loss, tuple(last) if rnn.state_parts == 2 else last[0]


class RnnDecode(torch.autograd.Function):
    """The loss and the last state as functions of every parameter and the initial state."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: TokenBuffers,
        rnn: RnnWeights,
        grad_enabled: bool,
        head_weight: Tensor,
        head_bias: Tensor | None,
        table: Tensor,
        *state_and_weights: Tensor,  # the parts of the state, then the weights of the cell
    ) -> tuple[Tensor, ...]:
        args, plan = tokens.args, workspace_plan(tokens.args)
        needs = None
        if grad_enabled and formed_in_forward(args):
            needs_weight, needs_bias, *needs_cell = ctx.needs_input_grad[3:]
            needs = NeedsGrad(any(needs_cell), needs_weight, needs_bias)
        with no_grad_no_autocast(table.device):
            cross_entropy = FusedCrossEntropy(args, plan, needs)
            buffers = _rnn_buffers(tokens, rnn, state_and_weights[: rnn.state_parts])
            _ForwardSteps(tokens, buffers, cross_entropy).run()
            gradients = cross_entropy.finish()
            value, inverse_divisor = tokens.reduced_loss()
            last = buffers.last_state()
        if grad_enabled:
            ctx.saved = SavedForBackward(tokens, plan, inverse_divisor, gradients)
            ctx.buffers = buffers
            ctx.save_for_backward(value)  # so that autograd refuses a second backward pass
        ctx.set_materialize_grads(False)
        if args.truncated:
            ctx.mark_non_differentiable(*last)
        return value.clone(), *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *d_last: Tensor | None) -> tuple[Any, ...]:
        saved: SavedForBackward = ctx.saved
        buffers: _RnnBuffers = ctx.buffers
        args, rnn = saved.args, buffers.rnn
        (value,) = ctx.saved_tensors
        saved.check_unchanged()
        needs_weight, needs_bias, needs_table, *needs_cell = ctx.needs_input_grad[3:]
        needs_state, needs_weights = needs_cell[: rnn.state_parts], needs_cell[rnn.state_parts :]
        through_cell = needs_table or any(needs_cell)
        with no_grad_no_autocast(value.device):
            if upstream is None:  # only the last state was used
                upstream = torch.zeros_like(value)
            else:
                args.gate.begin_backward(upstream)
            needs = NeedsGrad(through_cell, needs_weight, needs_bias)
            outputs = [buffers.outputs[1:].flatten(0, 1)]
            head, main = saved.head_gradients(upstream, outputs, needs, fuse_weight=True)
            table_main = main if args.tied else None
            if needs_table and not args.tied:
                table_main = table_destination(args)
            d_table = head.weight if args.tied else None
            cell = _ThroughTime(saved.tokens, buffers, needs_table, d_table, table_main)
            if through_cell:
                cell.run(head.hidden.view(args.steps, args.batch, -1), d_last)
            d_weight = head.weight if needs_weight and not args.tied and main is None else None
            d_bias = head.bias if needs_bias else None
            return (
                None,
                None,
                None,
                None if d_weight is None else d_weight.to(args.head_weight.dtype),
                None
                if d_bias is None or args.head_bias is None
                else d_bias.to(args.head_bias.dtype),
                cell.table_gradient() if needs_table else None,
                *cell.state_gradients(needs_state),
                *cell.weight_gradients(needs_weights),
            )


@dataclass(frozen=True)
class _RnnBuffers:
    """What the forward pass writes and the backward pass reads again; no pre-activations."""

    rnn: RnnWeights
    table: Tensor  # [R, E]: the embedding's weight, elements of a row next to each other
    weights: list[Tensor]  # as `rnn.weights`, in the accumulation dtype; an empty bias is none
    steps: StepBuffers
    dropout_scale: float  # of the units that dropout keeps
    state_dtypes: list[torch.dtype]  # of the parts of the given state

    @property
    def outputs(self) -> Tensor:
        """h of the last layer, [T + 1, B, H]: row t + 1 is the output of step t."""
        return self.steps.states[-self.rnn.state_parts]

    def last_state(self) -> list[Tensor]:
        """The parts of the state after the last step, as the module has them."""
        last = []
        for part, dtype in enumerate(self.state_dtypes):
            of_layers = [s[-1] for s in self.steps.states[part :: self.rnn.state_parts]]
            value = torch.stack(of_layers) if self.rnn.stacked else of_layers[0]
            last.append(value.to(dtype))
        return last


def _rnn_buffers(tokens: TokenBuffers, rnn: RnnWeights, state: tuple[Tensor, ...]) -> _RnnBuffers:
    """The weights as the operators take them, room for every state, and the dropout masks."""
    args, feedback = tokens.args, tokens.args.feedback
    empty = args.head_weight.new_empty(0, dtype=args.dtypes.accumulation)
    states = []
    for layer in range(rnn.layers):
        for part in state:
            states.append(empty.new_empty(args.steps + 1, args.batch, rnn.units))
            states[-1][0] = part[layer] if rnn.stacked else part
    dropout_mask, dropout_scale = None, 1.0
    if rnn.dropout > 0 and rnn.layers > 1:
        # The masks that the module would draw, one step and layer after the other.
        shape = (args.steps, rnn.layers - 1, args.batch, rnn.units)
        dropout_mask = torch.empty(shape, dtype=torch.bool, device=empty.device)
        ones = torch.ones(1, *shape[2:], dtype=state[0].dtype, device=empty.device)
        for mask in dropout_mask.flatten(0, 1):
            mask.copy_(F.dropout(ones, rnn.dropout)[0])  # 1 / (1 - p) where a unit is kept
        dropout_scale = 0.0 if rnn.dropout == 1 else 1 / (1 - rnn.dropout)
    return _RnnBuffers(
        rnn,
        rows_contiguous(args.table.weight.detach()),
        [empty if w is None else w.detach().to(empty.dtype).contiguous() for w in rnn.weights],
        StepBuffers(
            states,
            tokens.inputs,
            feedback.teacher.contiguous(),
            args.targets,
            tokens.tokens,
            None if feedback.mask is None else feedback.mask.contiguous(),
            tokens.live,
            feedback.uniforms,
            dropout_mask,
        ),
        dropout_scale,
        [part.dtype for part in state],
    )


class _ForwardSteps:
    """Runs the steps: states, tokens and losses."""

    def __init__(
        self, tokens: TokenBuffers, buffers: _RnnBuffers, cross_entropy: FusedCrossEntropy
    ) -> None:
        self._args, self._tokens, self._buffers = tokens.args, tokens, buffers
        self._cross_entropy = cross_entropy

    def run(self) -> None:
        """Every step of the call."""
        begin = 0
        for end, free_running in self._feedback_spans():
            if free_running:
                self._free_running(begin, end)
            else:
                self._teacher_forced(begin, end)
            begin = end

    def _feedback_spans(self) -> list[tuple[int, bool]]:
        """Ends of spans of steps, and whether any of their inputs waits for a prediction."""
        args, mask = self._args, self._args.feedback.mask
        if not self._tokens.free_running:
            return [(args.steps, False)]
        if args.eos is not None or mask is None or mask.device.type != "cpu":
            return [(args.steps, True)]  # on a GPU the host does not wait to read the mask
        predicted = [not row for row in mask[1:].all(1).tolist()]
        predicted += predicted[-1:] or [False]  # nothing follows the last step: it joins its span
        ends = [t + 1 for t in range(args.steps - 1) if predicted[t] != predicted[t + 1]]
        return [(end, predicted[end - 1]) for end in [*ends, args.steps]]

    def _teacher_forced(self, begin: int, end: int) -> None:
        """Steps whose inputs are known: the head takes them all at once."""
        following = slice(begin + 1, min(end + 1, self._args.steps))
        teacher = self._args.feedback.teacher[following]
        self._tokens.inputs[following] = self._tokens.padded(following, teacher)
        self._advance(self._buffers.steps, begin, end)
        outputs = self._buffers.outputs[begin + 1 : end + 1]
        self._tokens.predict(self._cross_entropy, begin, end, outputs.flatten(0, 1))

    def _free_running(self, begin: int, end: int) -> None:
        """Steps that read the prediction before them, as many at once as the workspace holds."""
        args, head, steps = self._args, self._cross_entropy, self._buffers.steps
        if head.rows < args.batch and head.forms_gradients:
            for step in range(begin, end):
                self._advance(steps, step, step + 1)
                self._tokens.predict(head, step, step + 1, self._buffers.outputs[step + 1])
                self._tokens.feed_back(step)
            return
        # A graph replays every window but the first, which warms up what is captured, and the last.
        size = max(1, head.rows // args.batch)
        replayed: _ReplayedWindow | None = None
        for first in range(begin, end, size):
            last = min(first + size, end)
            exps = head.workspace_slice((last - first) * args.batch)
            if args.cuda_graph and first > begin and first + size < min(args.steps, end + 1):
                if replayed is None:
                    replayed = _ReplayedWindow(self, size, exps)
                self._add_rows(*replayed.run(first))
                continue
            stats, rows = self._head_outputs((last - first) * args.batch)
            used = self._advance(steps, first, last, exps, stats, rows)
            self._add_rows(rows[:used], stats[:, :used])

    def _head_outputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """Where `decode_steps` writes the stats [3, rows] of rows, and which rows they are."""
        return self._tokens.losses.new_empty(3, rows), self._tokens.tokens.new_empty(rows)

    def _add_rows(self, rows: Tensor, stats: Tensor) -> None:
        """The losses of rows that `decode_steps` has put through the head."""
        tokens = self._tokens
        tokens.losses.view(-1)[rows] = self._cross_entropy.add_rows(
            self._buffers.outputs[1:].flatten(0, 1)[rows],
            self._args.targets.flatten()[rows],
            tokens.counted().flatten()[rows],
            rows,
            tokens.known_inverse_divisor,
            stats,
        )

    def _advance(
        self,
        steps: StepBuffers,
        begin: int,
        end: int,
        exps: Tensor | None = None,
        stats: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> int:
        """Run the steps; with `stats`, the head too. How many rows it has seen."""
        args, buffers, head = self._args, self._buffers, self._cross_entropy
        used: int = _operators.decode_steps(
            buffers.table,
            buffers.weights,
            steps.states,
            buffers.rnn.kind,
            steps.dropout_mask,
            buffers.dropout_scale,
            steps.inputs,
            steps.teacher,
            steps.teacher_mask,
            steps.live,
            -1 if args.eos is None else args.eos,
            args.table.padding_token,
            steps.uniforms,
            args.feedback.temperature,
            head.weight,
            head.bias,
            steps.targets,
            steps.tokens,
            exps,
            stats,
            rows,
            head.logit_rows,
            begin,
            end,
        )
        return used


class _ReplayedWindow:
    """A window of steps with the head, in a CUDA graph."""

    def __init__(self, forward: _ForwardSteps, steps: int, exps: Tensor | None) -> None:
        self._steps, self._batch = forward._buffers.steps, forward._args.batch
        self._stats, self._rows = stats, rows = forward._head_outputs(steps * self._batch)

        def body(buffers: StepBuffers, steps: int) -> None:
            forward._advance(buffers, 0, steps, exps, stats, rows)

        self._graph = WindowGraph(self._steps, steps, body)

    def run(self, begin: int) -> tuple[Tensor, Tensor]:
        """The steps from `begin` on: the rows that the head has seen, all of them, and stats."""
        self._graph.replay(self._steps, begin)
        return self._rows + begin * self._batch, self._stats


class _ThroughTime:
    """The backward pass through the cell and the embedding.

    Only what depends on the step behind it is serial over steps and layers. The rest are products
    over many steps, added into one buffer per weight.
    """

    def __init__(
        self,
        tokens: TokenBuffers,
        buffers: _RnnBuffers,
        needs_table: bool,
        d_table: Tensor | None,  # [R, E]: the tied head's gradient, to add to
        table_main: Destination | None,  # the main gradient to add the table's gradient to
    ) -> None:
        self._args, self._tokens, self._buffers = tokens.args, tokens, buffers
        self._rnn, self._states = buffers.rnn, buffers.steps.states
        self._needs_table, self._table_main = needs_table, table_main
        new_zeros, table = self._states[0].new_zeros, self._args.table
        self._d_weights = [w.new_zeros(w.shape) for w in buffers.weights]
        # weight_hh of every layer, transposed, since the product takes rows of the result
        self._transposed = [w.t().contiguous() for w in buffers.weights[1::4]]
        self._d_state = [new_zeros(state.shape[1:]) for state in self._states]
        self._d_table = d_table
        self._d_rows: Tensor | None = None  # [T, B, E]: of a sparse gradient
        if needs_table and d_table is None:
            if table_main is not None:
                self._d_table = table_main.main
            elif table.sparse:
                width = table.weight.shape[1]
                self._d_rows = new_zeros(self._args.steps, self._args.batch, width)
            else:
                self._d_table = new_zeros(table.weight.shape)

    def run(
        self,
        d_out: Tensor,  # [T, B, H]
        d_last: tuple[Tensor | None, ...],  # of the parts of the last state
    ) -> None:
        """Go back through every window of steps."""
        args, parts, stacked = self._args, self._rnn.state_parts, self._rnn.stacked
        for begin, counting, end in args.windows():
            d_state = [torch.zeros_like(d) for d in self._d_state]
            for part, given in enumerate(() if args.truncated else d_last):
                if given is not None:
                    for d, own in zip(d_state[part::parts], given if stacked else [given]):
                        d += own
            # in whole chunks from the end; the one at the beginning may be shorter
            size = backward_steps(args.batch)
            for stop in range(end, begin, -size):
                start = max(begin, stop - size)
                self._chunk(start, counting, stop, d_out[start:stop], d_state)
            if begin == 0:
                for total, gradient in zip(self._d_state, d_state, strict=True):
                    total += gradient

    def _chunk(
        self, begin: int, counting: int, end: int, d_out: Tensor, d_state: list[Tensor]
    ) -> None:
        """Steps [begin, end) of every layer; `d_state` goes from after them to before them."""
        args, buffers, span = self._args, self._buffers, slice(begin, end)
        if counting > begin:  # losses before step `counting` belong to another window
            d_out = d_out.clone()
            d_out[: counting - begin] = 0
        factors = self._gate_factors(begin, end, d_out)
        for layer in reversed(range(1, self._rnn.layers)):
            d_gates = self._layer(layer, begin, end, d_out, factors, d_state)
            d_out = torch.mm(d_gates, buffers.weights[4 * layer])
            d_out = d_out.view(end - begin, args.batch, -1)
            del d_gates
            if buffers.steps.dropout_mask is not None:
                mask = buffers.steps.dropout_mask[span, layer - 1]
                d_out.mul_(mask).mul_(buffers.dropout_scale)
        d_gates = self._layer(0, begin, end, d_out, factors, d_state)
        if self._needs_table:
            self._add_to_table(span, torch.mm(d_gates, buffers.weights[0]))

    def _layer(
        self,
        layer: int,
        begin: int,
        end: int,
        d_out: Tensor,
        factors: Tensor | None,
        d_state: list[Tensor],
    ) -> Tensor:
        """Steps [begin, end) of one layer; gradients of W_ih x + b_ih, [n B, gates H]."""
        args, rnn, buffers = self._args, self._rnn, self._buffers
        span, around = slice(begin, end), slice(begin, end + 1)
        own = layer * rnn.state_parts
        h = self._states[own][around]
        c = self._states[own + 1][around] if rnn.state_parts == 2 else None
        x = self._inputs(layer, span)
        weights = buffers.weights[4 * layer : 4 * layer + 4]
        before = h[:-1].flatten(0, 1)
        pre = None
        if GATES[rnn.kind] > 1:
            pre = pre_activations(rnn.kind, x, before, weights)
            pre = pre.view(end - begin, args.batch, -1)
        d_x = d_out.new_empty(end - begin, args.batch, GATES[rnn.kind] * rnn.units)
        d_h = torch.empty_like(d_x) if rnn.kind == GRU else None
        _operators.rnn_backward(
            rnn.kind,
            d_out.contiguous(),
            pre,
            h,
            c,
            None if self._tokens.live is None else self._tokens.live[span],
            factors,
            args.gate.limit,
            self._transposed[layer],
            d_state[own],
            d_state[own + 1] if c is not None else None,
            d_x,
            d_h,
        )
        d_x = d_x.flatten(0, 1)
        d_h = d_x if d_h is None else d_h.flatten(0, 1)
        w_ih, w_hh, b_ih, b_hh = self._d_weights[4 * layer : 4 * layer + 4]
        w_ih.addmm_(d_x.t(), x)
        w_hh.addmm_(d_h.t(), before)
        if b_ih.numel():
            b_ih += d_x.sum(0)
        if b_hh.numel():
            b_hh += d_h.sum(0)
        return d_x

    def _gate_factors(self, begin: int, end: int, like: Tensor) -> Tensor | None:
        """Factors [n, B] of the gradients that go on to the states before these steps."""
        args, factors = self._args, self._args.gate.factors
        if factors is not None:
            return factors[begin:end].to(like.dtype)
        if args.k2 is None or args.k1 != args.k2:
            return None
        passes = torch.arange(begin, end, device=like.device) % args.k1 != 0
        passes[0] |= begin == 0  # the initial state is not cut off
        return passes.to(like.dtype)[:, None].repeat(1, args.batch)

    def _inputs(self, layer: int, span: slice) -> Tensor:
        """What the layer read in these steps, [n B, E or H]."""
        buffers, mask = self._buffers, self._buffers.steps.dropout_mask
        if layer == 0:
            rows = buffers.table[self._tokens.inputs[span].flatten()]
            return rows.to(self._states[0].dtype)
        below = self._states[(layer - 1) * self._rnn.state_parts][span.start + 1 : span.stop + 1]
        if mask is not None:
            below = below * mask[span, layer - 1] * buffers.dropout_scale
        return below.flatten(0, 1)

    def _add_to_table(self, span: slice, gradient: Tensor) -> None:
        """Add the gradient [n B, E] of the rows that these steps looked up."""
        tokens, table = self._tokens.inputs[span].flatten(), self._args.table
        if table.padding_idx is not None:
            gradient.masked_fill_((tokens == table.padding_idx)[:, None], 0)
        if self._table_main is not None:
            gradient.mul_(self._table_main.factor)
        if self._d_rows is not None:
            self._d_rows[span] += gradient.view_as(self._d_rows[span])
        elif self._d_table is not None:
            self._d_table.index_add_(0, tokens, gradient)

    def table_gradient(self) -> Tensor | None:
        """The embedding's gradient; None where it is in a main gradient."""
        table = self._args.table.weight
        if self._table_main is not None:
            return None
        if self._d_rows is not None:
            tokens = self._tokens.inputs.flatten()[None]
            rows = self._d_rows.flatten(0, 1).to(table.dtype)
            return torch.sparse_coo_tensor(tokens, rows, table.shape, check_invariants=False)
        assert self._d_table is not None
        return self._d_table.to(table.dtype)

    def state_gradients(self, needed: list[bool]) -> list[Tensor | None]:
        """Of the parts of the initial state, as they were given."""
        gradients: list[Tensor | None] = []
        for part, dtype in enumerate(self._buffers.state_dtypes):
            of_layers = self._d_state[part :: self._rnn.state_parts]
            gradient = torch.stack(of_layers) if self._rnn.stacked else of_layers[0]
            gradients.append(gradient.to(dtype) if needed[part] else None)
        return gradients

    def weight_gradients(self, needed: list[bool]) -> list[Tensor | None]:
        """Of the weights that the module has, in its order."""
        pairs = zip(self._rnn.weights, self._d_weights, strict=True)
        given = [(weight, gradient) for weight, gradient in pairs if weight is not None]
        return [
            gradient.to(weight.dtype) if need else None
            for (weight, gradient), need in zip(given, needed, strict=True)
        ]
