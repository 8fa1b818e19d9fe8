"""The path for torch's recurrent modules: steps forward and backward are operators on the weights,
and everything that need not wait for the next step is batched.

`RnnDecode` is the node of the graph; `_ForwardSteps` and `_ThroughTime` are its two passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from accumext import _scalars
from accumext._wgrad_fusion import Destination
from accumext.decoder import _operators
from accumext.decoder._arguments import DecodeArguments
from accumext.decoder._fused_cross_entropy import (
    FusedCrossEntropy,
    NeedsGrad,
    cast_like,
    new_buffer,
)
from accumext.decoder._memory import backward_steps, workspace_plan
from accumext.decoder._precision import no_grad_no_autocast
from accumext.decoder._recurrent_state import State
from accumext.decoder._rnn_weights import GRU, RnnWeights
from accumext.decoder._saved_for_backward import SavedForBackward
from accumext.decoder._token_buffers import TokenBuffers


def decode_with_rnn(tokens: TokenBuffers, rnn: RnnWeights) -> tuple[Tensor, State]:
    """The loss and the last state of a call whose cell the operators run."""
    args = tokens.args
    state = list(args.state) if rnn.state_parts == 2 else [args.state]
    parameters = [args.head_weight, args.head_bias, args.table.weight]
    weights = [w for w in rnn.weights if w is not None]
    loss, *last = RnnDecode.apply(  # type: ignore[no-untyped-call]
        tokens, rnn, torch.is_grad_enabled(), *parameters, *state, *weights
    )
    return loss, tuple(last) if rnn.state_parts == 2 else last[0]


class RnnDecode(torch.autograd.Function):
    """The loss and the last state as functions of every parameter and the initial state."""

    @staticmethod
    def forward(
        ctx: Any, tokens: TokenBuffers, rnn: RnnWeights, grad_enabled: bool, head_weight: Tensor,
        head_bias: Tensor | None, table: Tensor,
        *state_and_weights: Tensor,  # the parts of the state, then the weights of the cell
    ) -> tuple[Tensor, ...]:  # fmt: skip
        args, plan = tokens.args, workspace_plan(tokens.args)
        needs = None
        if grad_enabled and args.head_gradients_in_forward:
            needs_weight, needs_bias, *needs_cell = ctx.needs_input_grad[3:]
            needs = NeedsGrad(any(needs_cell), needs_weight, needs_bias)
        with no_grad_no_autocast(table.device):
            cross_entropy = FusedCrossEntropy(args, plan, needs)
            buffers = _rnn_buffers(tokens, rnn, state_and_weights[: rnn.state_parts])
            _ForwardSteps(args, tokens, buffers, cross_entropy).run()
            gradients = cross_entropy.finish()
            value, inverse_divisor = tokens.reduced_loss()
            last = buffers.module_state([state[-1] for state in buffers.steps.states])
        if grad_enabled:
            ctx.saved = SavedForBackward(tokens, plan, inverse_divisor, gradients)
            ctx.buffers = buffers
            ctx.save_for_backward(value)  # autograd then refuses a second pass unless retained
        ctx.set_materialize_grads(False)
        if args.truncated:
            ctx.mark_non_differentiable(*last)
        return value.clone(), *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *d_last: Tensor | None) -> tuple[Any, ...]:
        saved: SavedForBackward = ctx.saved
        buffers: _RnnBuffers = ctx.buffers
        args = saved.args
        (value,) = ctx.saved_tensors
        saved.check_unchanged()
        needs_weight, needs_bias, needs_table, *needs_cell = ctx.needs_input_grad[3:]
        through_cell = needs_table or any(needs_cell)
        with no_grad_no_autocast(value.device):
            if upstream is None:  # only the last state was used
                upstream = torch.zeros_like(value)
            else:
                args.gate.begin_backward(upstream)
            needs = NeedsGrad(through_cell, needs_weight, needs_bias)
            outputs = [buffers.outputs[1:].flatten(0, 1)]
            head, main = saved.head_gradients(upstream, outputs, needs, fuse_weight=True)
            table_main = main
            if not args.tied:
                table_main = saved.table_destination() if needs_table else None
            d_table = head.weight if args.tied else None
            cell = _ThroughTime(saved.tokens, buffers, needs_table, d_table, table_main)
            if through_cell:
                cell.run(head.hidden.view(args.steps, args.batch, -1), d_last)
            d_weight = head.weight if needs_weight and not args.tied and main is None else None
            return (
                *(None, None, None),
                cast_like(d_weight, args.head_weight),
                cast_like(head.bias if needs_bias else None, args.head_bias),
                cell.table_gradient() if needs_table else None,
                *cell.state_and_weight_gradients(needs_cell),
            )


class StepBuffers(NamedTuple):
    """What the operators read and write per step; states have a row more, before and after."""

    states: list[Tensor]  # per layer h, and c of an LSTM: [T + 1, B, H]
    inputs: Tensor  # int64 [T, B]
    teacher: Tensor  # int64 [T, B]
    targets: Tensor  # int64 [T, B]
    tokens: Tensor  # int64 [T, B]
    teacher_mask: Tensor | None  # bool [T, B]
    live: Tensor | None  # bool [T, B]
    uniforms: Tensor | None  # fp64 [T, B]
    dropout_mask: Tensor | None  # bool [T, L - 1, B, H]: units that dropout keeps


@dataclass(frozen=True)
class _RnnBuffers:
    """What the forward pass writes and the backward pass reads again; no pre-activations."""

    rnn: RnnWeights
    table: Tensor  # [R, E]: the embedding's weight, elements of a row next to each other
    weights: list[Tensor]  # as `rnn.weights`, in the dtypes of the products; an empty bias is none
    steps: StepBuffers
    dropout_scale: float  # of the units that dropout keeps
    state_dtypes: list[torch.dtype]  # of the parts of the given state

    @property
    def outputs(self) -> Tensor:
        """h of the last layer, [T + 1, B, H]: row t + 1 is the output of step t."""
        return self.steps.states[-self.rnn.state_parts]

    def module_state(self, of_layers: list[Tensor]) -> list[Tensor]:
        """Tensors [B, H], as `steps.states` has them, in the module's parts and dtypes."""
        parts = [of_layers[part :: self.rnn.state_parts] for part in range(self.rnn.state_parts)]
        stacked = [torch.stack(part) if self.rnn.stacked else part[0] for part in parts]
        return [part.to(dtype) for part, dtype in zip(stacked, self.state_dtypes, strict=True)]


def _rnn_buffers(tokens: TokenBuffers, rnn: RnnWeights, state: tuple[Tensor, ...]) -> _RnnBuffers:
    """The weights as the operators take them, space for every state, and the dropout masks."""
    args, feedback = tokens.args, tokens.args.feedback
    table = args.table.weight.detach()
    table = table if table.stride(1) == 1 else table.contiguous()
    empty = args.head_weight.new_empty(0, dtype=args.dtypes.accumulation)
    states = []
    for layer in range(rnn.layers):
        for part in state:
            states.append(empty.new_empty(args.steps + 1, args.batch, rnn.units))
            states[-1][0] = part[layer] if rnn.stacked else part
    dropout_mask, dropout_scale = None, 1.0
    if rnn.dropout > 0 and rnn.layers > 1:
        shape = (args.steps, rnn.layers - 1, args.batch, rnn.units)
        dropout_mask = _dropout_mask(rnn.dropout, state[0].new_ones(1, *shape[2:]), shape)
        dropout_scale = 0.0 if rnn.dropout == 1 else 1 / (1 - rnn.dropout)
    steps = StepBuffers(
        states, tokens.inputs, feedback.teacher.contiguous(), args.targets, tokens.tokens,
        None if feedback.mask is None else feedback.mask.contiguous(),
        tokens.live, feedback.uniforms, dropout_mask,
    )  # fmt: skip
    dtypes = [args.dtypes.cell] * 2 + [empty.dtype] * 2  # weight_ih, weight_hh, the biases
    weights = [empty if w is None else w.detach() for w in rnn.weights]
    weights = [w.to(dtypes[i % 4]).contiguous() for i, w in enumerate(weights)]
    return _RnnBuffers(rnn, table, weights, steps, dropout_scale, [part.dtype for part in state])


def _dropout_mask(
    rate: float,
    ones: Tensor,  # [1, B, H], in the dtype of the state
    shape: tuple[int, ...],  # [T, L - 1, B, H]
) -> Tensor:  # bool
    """Which units are kept between layers.

    On a CPU they are those that the module would keep. On a device they are drawn in one launch,
    not in two for each step and layer, and are others.
    """
    mask = torch.empty(shape, dtype=torch.bool, device=ones.device)
    if not _scalars.on_host(ones):
        return mask.bernoulli_(1.0 - rate)
    for part in mask.flatten(0, 1):
        part.copy_(F.dropout(ones, rate)[0])  # 1 / (1 - rate) where a unit is kept
    return mask


@dataclass(frozen=True)
class _ForwardSteps:
    """Runs the steps: states, tokens and losses."""

    args: DecodeArguments
    tokens: TokenBuffers
    buffers: _RnnBuffers
    cross_entropy: FusedCrossEntropy

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
        args, mask = self.args, self.args.feedback.mask
        if not args.free_running:
            return [(args.steps, False)]
        if args.eos is not None or mask is None or mask.device.type != "cpu":
            return [(args.steps, True)]  # on a GPU the host does not wait to read the mask
        predicted = [not row for row in mask[1:].all(1).tolist()]
        predicted += predicted[-1:] or [False]  # nothing follows the last step: it joins its span
        ends = [t + 1 for t in range(args.steps - 1) if predicted[t] != predicted[t + 1]]
        return [(end, predicted[end - 1]) for end in [*ends, args.steps]]

    def _teacher_forced(self, begin: int, end: int) -> None:
        """Steps whose inputs are known: the head takes them all at once."""
        following = slice(begin + 1, min(end + 1, self.args.steps))
        teacher = self.args.feedback.teacher[following]
        self.tokens.inputs[following] = self.tokens.padded(following, teacher)
        self._advance(begin, end)
        outputs = self.buffers.outputs[begin + 1 : end + 1]
        self.tokens.predict(self.cross_entropy, begin, end, outputs.flatten(0, 1))

    def _free_running(self, begin: int, end: int) -> None:
        """Steps that read the prediction before them, as many at once as the workspace holds."""
        args, head = self.args, self.cross_entropy
        if head.rows < args.batch and head.forms_gradients:
            for step in range(begin, end):
                self._advance(step, step + 1)
                self.tokens.predict(head, step, step + 1, self.buffers.outputs[step + 1])
                self.tokens.feed_back(step)
            return
        size = max(1, head.rows // args.batch)
        stats = self.tokens.losses.new_empty(3, size * args.batch)
        rows = self.tokens.tokens.new_empty(size * args.batch)
        for first in range(begin, end, size):
            last = min(first + size, end)
            exps = head.workspace_slice((last - first) * args.batch)
            used = self._advance(first, last, exps, stats, rows)
            self._add_rows(rows[:used].clone(), stats[:, :used])

    def _add_rows(self, rows: Tensor, stats: Tensor) -> None:
        """The losses of rows that `decode_steps` has put through the head."""
        tokens = self.tokens
        tokens.losses.view(-1)[rows] = self.cross_entropy.add_rows(
            self.buffers.outputs[1:].flatten(0, 1)[rows], self.args.targets.flatten()[rows],
            tokens.counted().flatten()[rows], rows, tokens.known_inverse_divisor, stats,
        )  # fmt: skip

    def _advance(
        self, begin: int, end: int, exps: Tensor | None = None, stats: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> int:  # fmt: skip
        """Run the steps; with `stats`, the head too. How many rows it has seen."""
        args, buffers, head = self.args, self.buffers, self.cross_entropy
        steps = buffers.steps
        used: int = _operators.decode_steps(
            buffers.table, buffers.weights, steps.states, buffers.rnn.kind, steps.dropout_mask,
            buffers.dropout_scale, steps.inputs, steps.teacher, steps.teacher_mask, steps.live,
            -1 if args.eos is None else args.eos, args.table.padding_token, steps.uniforms,
            args.feedback.temperature, head.weight, head.bias, steps.targets, steps.tokens, exps,
            stats, rows, head.logit_rows, begin, end,
        )  # fmt: skip
        return used


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
        self._d_weights = [new_zeros(w.shape) for w in buffers.weights]
        # weight_hh of every layer, transposed, since the product takes rows of the result
        self._transposed = [w.t().contiguous() for w in buffers.weights[1::4]]
        self._d_state = [new_zeros(state.shape[1:]) for state in self._states]
        self._d_table = d_table
        self._d_rows: Tensor | None = None  # [T, B, E]: of a sparse gradient
        if needs_table and d_table is None:
            if table_main is not None:
                self._d_table = table_main.main_grad
            elif table.sparse:
                width = table.weight.shape[1]
                self._d_rows = new_zeros(self._args.steps, self._args.batch, width)
            else:
                dtype = self._args.dtypes.accumulation
                self._d_table = new_buffer(table.weight, *table.weight.shape, dtype=dtype).zero_()

    def run(self, d_out: Tensor, d_last: tuple[Tensor | None, ...]) -> None:
        """Every window, from the gradients of the outputs [T, B, H] and of the last state."""
        args, parts, stacked = self._args, self._rnn.state_parts, self._rnn.stacked
        for begin, counting, end in args.windows():
            d_state = [torch.zeros_like(d) for d in self._d_state]
            for part, given in enumerate(() if args.truncated else d_last):
                if given is not None:
                    for d, of_layer in zip(d_state[part::parts], given if stacked else [given]):
                        d += of_layer
            # in whole chunks from the end; the one at the beginning may be shorter
            size = backward_steps(args.batch)
            for stop in range(end, begin, -size):
                span = slice(max(begin, stop - size), stop)
                self._chunk(span, counting, d_out[span], d_state)
            if begin == 0:
                for total, gradient in zip(self._d_state, d_state, strict=True):
                    total += gradient

    def _chunk(self, span: slice, counting: int, d_out: Tensor, d_state: list[Tensor]) -> None:
        """These steps of every layer; `d_state` goes from after them to before them."""
        if counting > span.start:  # losses before step `counting` belong to another window
            d_out = d_out.clone()
            d_out[: counting - span.start] = 0
        factors, buffers = self._gate_factors(span, d_out), self._buffers
        for layer in reversed(range(1, self._rnn.layers)):
            d_gates = self._layer(layer, span, d_out, factors, d_state)
            d_out = _matmul(d_gates, buffers.weights[4 * layer]).view(*d_out.shape[:2], -1)
            del d_gates
            if buffers.steps.dropout_mask is not None:
                mask = buffers.steps.dropout_mask[span, layer - 1]
                d_out.mul_(mask).mul_(buffers.dropout_scale)
        d_gates = self._layer(0, span, d_out, factors, d_state)
        if self._needs_table:
            self._add_to_table(span, _matmul(d_gates, buffers.weights[0]))

    def _layer(
        self, layer: int, span: slice, d_out: Tensor, factors: Tensor | None, d_state: list[Tensor]
    ) -> Tensor:
        """These steps of one layer; gradients of W_ih x + b_ih, [n B, gates H]."""
        rnn, buffers, live = self._rnn, self._buffers, self._tokens.live
        around, first = slice(span.start, span.stop + 1), layer * rnn.state_parts
        h = self._states[first][around]
        c = self._states[first + 1][around] if rnn.state_parts == 2 else None
        x = self._inputs(layer, span)
        weights = buffers.weights[4 * layer : 4 * layer + 4]
        before = h[:-1].flatten(0, 1)
        pre = None
        if rnn.gates > 1:
            pre = pre_activations(rnn.kind, x, before, weights).view(*d_out.shape[:2], -1)
        d_x = d_out.new_empty(*d_out.shape[:2], rnn.gates * rnn.units)
        d_h = torch.empty_like(d_x) if rnn.kind == GRU else None
        _operators.rnn_backward(
            rnn.kind, d_out.contiguous(), pre, h, c,
            None if live is None else live[span], factors,
            self._args.gate.limit, self._transposed[layer], d_state[first],
            d_state[first + 1] if c is not None else None, d_x, d_h,
        )  # fmt: skip
        d_x = d_x.flatten(0, 1)
        d_h = d_x if d_h is None else d_h.flatten(0, 1)
        w_ih, w_hh, b_ih, b_hh = self._d_weights[4 * layer : 4 * layer + 4]
        _operators.add_matmul(w_ih, d_x.t().to(weights[0].dtype), x, False)
        _operators.add_matmul(w_hh, d_h.t().to(weights[1].dtype), before, False)
        if b_ih.numel():
            b_ih += d_x.sum(0)
        if b_hh.numel():
            b_hh += d_h.sum(0)
        return d_x

    def _gate_factors(self, span: slice, like: Tensor) -> Tensor | None:
        """Factors [n, B] of the gradients that go on to the states before these steps."""
        args, factors = self._args, self._args.gate.factors
        if factors is not None:
            return factors[span].to(like.dtype)
        if args.k2 is None or args.k1 != args.k2:
            return None
        passes = torch.arange(span.start, span.stop, device=like.device) % args.k1 != 0
        passes[0] |= span.start == 0  # the initial state is not cut off
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

    def state_and_weight_gradients(self, needed: list[bool]) -> list[Tensor | None]:
        """Of the parts of the initial state, then of the weights that the module has."""
        pairs = zip(self._rnn.weights, self._d_weights, strict=True)
        gradients = self._buffers.module_state(self._d_state)
        gradients += [d.to(weight.dtype) for weight, d in pairs if weight is not None]
        return [d if need else None for d, need in zip(gradients, needed, strict=True)]


def pre_activations(
    kind: int,
    x: Tensor,  # [M, E]
    h: Tensor,  # [M, H]
    weights: list[Tensor],  # weight_ih, weight_hh, bias_ih, bias_hh; an empty bias is none
) -> Tensor:
    """What the nonlinearities of a layer are applied to, [M, 4 H] or [M, H].

    r, z, n's part of x and n's part of h for a GRU; i, f, g, o for an LSTM.
    """
    w_ih, w_hh, b_ih, b_hh = weights
    from_x, from_h = _matmul(x, w_ih.t()), _matmul(h, w_hh.t())
    for part, bias in ((from_x, b_ih), (from_h, b_hh)):
        if bias.numel():
            part += bias
    if kind != GRU:
        return from_x.add_(from_h)
    rz = 2 * h.shape[1]
    pre = from_x.new_empty(len(x), 2 * rz)
    torch.add(from_x[:, :rz], from_h[:, :rz], out=pre[:, :rz])
    pre[:, rz : rz + rz // 2] = from_x[:, rz:]
    pre[:, rz + rz // 2 :] = from_h[:, rz:]
    return pre


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with operands rounded to the dtype of `right`, sums in that of `left`."""
    sums = left.new_empty(left.shape[0], right.shape[1])
    _operators.add_matmul(sums, left.to(right.dtype), right, True)
    return sums
