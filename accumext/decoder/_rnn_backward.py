"""The path for torch's recurrent modules: the node of the graph, `RnnDecode`, and its backward pass
through the cell and the embedding."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, NeedsGrad, new_buffer
from accumext.decoder._plan import PRE_ACTIVATIONS
from accumext.decoder._rnn_forward import RnnForward, rnn_forward
from accumext.decoder._rnn_weights import GRU, RnnWeights, module_state
from accumext.decoder._saved_for_backward import SavedForBackward
from accumext.decoder._transcript import Decoded, Transcript
from accumext.ops.wgrad_fusion import destination
from accumext.recurrence import OPEN_GATE, Resets, cuts
from accumext.tensors import scalars
from accumext.tensors.checks import check_first_order


def decode_with_rnn(transcript: Transcript, rnn: RnnWeights, return_outputs: bool) -> Decoded:
    """Run a call of `decode_loss` whose cell is one of torch's modules."""
    model, state = transcript.model, transcript.tokens.state
    parts = list(state) if rnn.state_parts == 2 else [state]
    parameters = [model.head_weight, model.head_bias, model.table.weight]
    loss, outputs, lengths, *last = RnnDecode.apply(  # type: ignore[no-untyped-call]
        transcript, rnn, return_outputs, torch.is_grad_enabled(), *parameters, *parts, *rnn.given
    )
    return Decoded(loss, tuple(last) if rnn.state_parts == 2 else last[0], lengths, outputs)


class RnnDecode(torch.autograd.Function):
    """The loss, the last state and, if requested, the cell's outputs, as functions of all
    parameters and the initial state."""

    @staticmethod
    def forward(
        ctx: Any, transcript: Transcript, rnn: RnnWeights, return_outputs: bool, grad_enabled: bool,
        head_weight: Tensor, head_bias: Tensor | None, table: Tensor,
        *state_and_weights: Tensor,  # the parts of the state, then the weights of the cell
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        needs, plan, size = None, transcript.plan, transcript.losses.numel()
        if grad_enabled and plan.gradients_in_forward:
            needs_weight, needs_bias, *needs_cell = ctx.needs_input_grad[4:]
            needs = NeedsGrad(any(needs_cell), needs_weight, needs_bias)
        with torch.autocast(table.device.type, enabled=False):
            parts = state_and_weights[: rnn.state_parts]
            keeps = grad_enabled and plan.pre_activation_bytes > 0
            passed = rnn_forward(transcript, rnn, parts, keeps)
            head = FusedCrossEntropy(transcript.model, transcript.objective, plan, size, needs)
            passed.run(head)
            gradients = head.finish()
            value, inverse_divisor, lengths = transcript.finish()
            last_rows = list(map(itemgetter(-1), passed.steps.states))
            last = module_state(rnn, last_rows, passed.state_dtypes)
            outputs = passed.outputs.clone() if return_outputs else None
        if grad_enabled:
            ctx.saved = SavedForBackward(transcript, inverse_divisor, gradients)
            ctx.passed = passed
            ctx.save_for_backward(value)  # autograd then refuses a second pass unless retained
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lengths, *(last if transcript.truncation.cuts else ()))
        return value.clone(), outputs, lengths, *last

    @staticmethod
    def backward(
        ctx: Any, upstream: Tensor | None, d_outputs: Tensor | None, _: None,
        *d_last: Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        if torch.is_grad_enabled():
            check_first_order("decode_loss")
        saved: SavedForBackward = ctx.saved
        passed: RnnForward = ctx.passed
        model, transcript = saved.model, saved.transcript
        (value,) = ctx.saved_tensors
        saved.check_unchanged()
        needs_weight, needs_bias, needs_table, *needs_cell = ctx.needs_input_grad[4:]
        through_cell = needs_table or any(needs_cell)
        with torch.autocast(value.device.type, enabled=False):
            if upstream is None:  # the loss was not used
                upstream = torch.zeros_like(value)
            elif transcript.gate.clip is not None:
                transcript.gate.begin_backward(upstream)
            steps, batch = transcript.losses.shape
            needs = NeedsGrad(through_cell, needs_weight, needs_bias)
            head, main = saved.head_gradients(
                upstream, partial(passed.pieces, transcript.plan.rows), needs, fuse_weight=True
            )
            cell = RnnBackward(passed, needs_table, head.weight, main)
            if through_cell:
                cell.run(head.hidden.view(steps, batch, -1), d_outputs, d_last)
            d_weight = head.weight if needs_weight and not model.tied and main is None else None
            return (
                *(None, None, None, None),
                None if d_weight is None else d_weight.to(model.head_weight.dtype),
                head.bias_like(model.head_bias) if needs_bias else None,
                cell.table_gradient() if needs_table else None,
                *cell.state_and_weight_gradients(needs_cell),
            )


class RnnBackward:
    """The backward pass through the cell and the embedding.

    Only gradients of states and gates are computed step by step. Gradients of weights are products
    over many steps, added into one buffer per weight.
    """

    def __init__(
        self,
        passed: RnnForward,
        needs_table: bool,
        d_head: Tensor | None,  # [V, H]: head's gradient; that of a tied embedding is added to it
        main: Tensor | None,  # d_head if it is a main gradient
    ) -> None:
        transcript, model = passed.transcript, passed.transcript.model
        self._passed, self._transcript, self._rnn = passed, transcript, passed.rnn
        self._weights, self._states = passed.steps.weights, passed.steps.states
        self._needs_table, self._table = needs_table, model.table
        new_zeros, tokens = self._states[0].new_zeros, transcript.tokens
        self._d_weights = list(map(new_zeros, map(Tensor.size, self._weights)))
        # weight_hh of every layer, transposed; kernels of a CPU need no contiguous copy
        self._transposed = list(map(Tensor.t, self._weights[1::4]))
        if not scalars.on_host(self._states[0]):
            self._transposed = list(map(Tensor.contiguous, self._transposed))
        self._d_state = list(map(torch.zeros_like, map(itemgetter(0), self._states)))
        self._d_table, self._table_main = d_head, main
        self._d_rows: Tensor | None = None  # [T, B, E]: values of a sparse gradient
        weight, dtype = model.table.weight, model.dtypes.accumulation
        if model.tied or not needs_table:
            return
        if model.table.sparse:
            self._d_rows = new_zeros(tokens.steps, tokens.batch, weight.shape[1])
            return
        self._d_table = self._table_main = destination(weight, dtype)
        if self._d_table is None:
            self._d_table = new_buffer(weight, *weight.shape, dtype=dtype).zero_()

    def run(
        self,
        d_head: Tensor,  # [T, B, H]: gradient of what the head read
        d_outputs: Tensor | None,  # [T, B, H]: of the outputs, if they were returned
        d_last: tuple[Tensor | None, ...],
    ) -> None:
        """Go back through every window, from the gradients of the outputs and the last state."""
        truncation, resets = self._transcript.truncation, self._passed.resets
        parts, stacked = self._rnn.state_parts, self._rnn.stacked
        dropout = self._passed.steps.of_outputs
        # Steps are cut into chunks from the end: the one at the beginning may be shorter.
        size = self._transcript.plan.backward_steps
        for begin, counting, end in truncation.spans(self._transcript.tokens.steps):
            d_state = list(map(torch.zeros_like, self._d_state))
            for part, given in enumerate(() if truncation.cuts else d_last):
                if given is not None:
                    for d, of_layer in zip(d_state[part::parts], given if stacked else [given]):
                        d += of_layer
            # A span may have resets only before its first step. The last span comes first.
            spans = [(begin, end)] if resets is None else cuts(begin, end, resets.steps)
            for first, last in reversed(spans):
                for stop in range(last, first, -size):
                    span = slice(max(first, stop - size), stop)
                    d_out = d_head[span]
                    if dropout.mask is not None:
                        d_out = dropout.apply(d_out, span)
                    if d_outputs is not None:
                        d_out = d_out + d_outputs[span]
                    if resets is None:
                        self._chunk(span, counting, d_out, d_state)
                        continue
                    with self._passed.reset_before(resets, span.start):
                        self._chunk(span, counting, d_out, d_state)
                if resets is not None and first in resets.steps:
                    self._take_resets(resets, first, d_state)
            if begin == 0:
                for total, gradient in zip(self._d_state, d_state, strict=True):
                    total += gradient

    def _take_resets(self, resets: Resets, step: int, d_state: list[Tensor]) -> None:
        """Move the gradients of rows that were reset before `step` to the initial state's."""
        anew = resets.at(step, self._transcript.active)[:, None]
        for total, gradient in zip(self._d_state, d_state, strict=True):
            total += torch.where(anew, gradient, 0)
            gradient.masked_fill_(anew, 0)

    def _chunk(self, span: slice, counting: int, d_out: Tensor, d_state: list[Tensor]) -> None:
        """Go back through these steps of every layer. `d_state`, the gradient of the state after
        them, becomes that of the state before them."""
        if counting > span.start:  # losses before step `counting` belong to another window
            d_out = d_out.clone()
            d_out[: counting - span.start] = 0
        gate, steps = self._transcript.gate, self._passed.steps
        factors = None if gate is OPEN_GATE else gate.row_factors(span, d_out)
        for layer in reversed(range(1, self._rnn.layers)):
            d_gates = self._layer(layer, span, d_out, factors, d_state)
            d_out = _matmul(d_gates, self._weights[4 * layer]).view(*d_out.shape[:2], -1)
            del d_gates
            if steps.between.mask is not None:
                d_out.mul_(steps.between.mask[span, layer - 1]).mul_(steps.between.scale)
        d_gates = self._layer(0, span, d_out, factors, d_state)
        if self._needs_table:
            d_x = _matmul(d_gates, self._weights[0]).view(*d_out.shape[:2], -1)
            if steps.of_inputs.mask is not None:
                d_x = steps.of_inputs.apply(d_x, span)
            self._add_to_table(span, d_x.flatten(0, 1))

    def _layer(
        self, layer: int, span: slice, d_out: Tensor, factors: Tensor | None, d_state: list[Tensor]
    ) -> Tensor:
        """Go back through steps of a layer. Return gradients of W_ih x + b_ih, [n B, gates H]."""
        rnn, active, gate = self._rnn, self._transcript.active, self._transcript.gate
        around, first = slice(span.start, span.stop + 1), layer * rnn.state_parts
        h = self._states[first][around]
        c = self._states[first + 1][around] if rnn.state_parts == 2 else None
        x = self._inputs(layer, span)
        weights = self._weights[4 * layer : 4 * layer + 4]
        before = h[:-1].flatten(0, 1)
        pre = self._passed.steps.pre
        if pre is not None:
            pre = pre[layer, span]
        elif rnn.gates > 1:
            pre = pre_activations(rnn.kind, x, before, weights).view(*d_out.shape[:2], -1)
        d_x = d_out.new_empty(*d_out.shape[:2], rnn.gates * rnn.units)
        d_h = torch.empty_like(d_x) if rnn.kind == GRU else None
        _operators.rnn_backward(
            rnn.kind, d_out.contiguous(), pre, h, c, None if active is None else active[span],
            factors, gate.limit, self._transposed[layer], d_state[first],
            d_state[first + 1] if c is not None else None, d_x, d_h,
        )  # fmt: skip
        del pre  # makes room for the copies of d_x and d_h in half precision
        d_x = d_x.flatten(0, 1)
        d_h = d_x if d_h is None else d_h.flatten(0, 1)
        w_ih, w_hh, b_ih, b_hh = self._d_weights[4 * layer : 4 * layer + 4]
        _operators.add_matmul(w_ih, d_x.t().to(weights[0].dtype), x, False)
        _operators.add_matmul(w_hh, d_h.t().to(weights[1].dtype), before, False)
        # On a CPU a product with ones would follow `torch.set_float32_matmul_precision`, so it is a
        # sum. On a GPU a sum can take as much memory as the rows, and addmv_ ignores that setting.
        for bias, rows in ((b_ih, d_x), (b_hh, d_h)):
            if bias.numel():
                if rows.is_cpu:
                    bias += rows.sum(0)
                else:
                    bias.addmv_(rows.t(), rows.new_ones(rows.shape[0]))
        return d_x

    def _inputs(self, layer: int, span: slice) -> Tensor:
        """Return the inputs of the layer in these steps, [n B, E or H]."""
        steps = self._passed.steps
        if layer == 0:
            rows = steps.table[steps.inputs[span]].to(self._states[0].dtype)
            if steps.of_inputs.mask is not None:
                rows = steps.of_inputs.apply(rows, span)
            return rows.flatten(0, 1)
        below = self._states[(layer - 1) * self._rnn.state_parts][span.start + 1 : span.stop + 1]
        if steps.between.mask is not None:
            below = below * steps.between.mask[span, layer - 1] * steps.between.scale
        return below.flatten(0, 1)

    def _add_to_table(self, span: slice, gradient: Tensor) -> None:
        """Add the gradient [n B, E] of the rows that these steps looked up."""
        tokens, table = self._transcript.inputs[span].flatten(), self._table
        if table.padding_idx is not None:
            gradient.masked_fill_((tokens == table.padding_idx)[:, None], 0)
        if self._d_rows is not None:
            self._d_rows[span] += gradient.view_as(self._d_rows[span])
        elif self._d_table is not None:
            _operators.add_rows(self._d_table, tokens, None, gradient, None)

    def table_gradient(self) -> Tensor | None:
        """Return the embedding's gradient; None if it was added to a main gradient."""
        table = self._table.weight
        if self._table_main is not None:
            return None
        if self._d_rows is not None:
            tokens = self._transcript.inputs.flatten()[None]
            rows = self._d_rows.flatten(0, 1).to(table.dtype)
            return torch.sparse_coo_tensor(tokens, rows, table.shape, check_invariants=False)
        assert self._d_table is not None
        return self._d_table.to(table.dtype)

    def state_and_weight_gradients(self, needed: list[bool]) -> list[Tensor | None]:
        """Return the gradients of the initial state's parts, then of the weights that exist."""
        gradients = module_state(self._rnn, self._d_state, self._passed.state_dtypes)
        for weight, gradient in zip(self._rnn.weights, self._d_weights, strict=True):
            if weight is not None:
                gradients.append(gradient.to(weight.dtype))
        wanted: list[Tensor | None] = []
        for gradient, need in zip(gradients, needed, strict=True):
            wanted.append(gradient if need else None)
        return wanted


def pre_activations(
    kind: int,
    x: Tensor,  # [M, E]
    h: Tensor,  # [M, H]
    weights: list[Tensor],  # weight_ih, weight_hh, bias_ih, bias_hh; no bias is an empty tensor
) -> Tensor:
    """Return the pre-activations [M, 4 H] of a layer of a GRU or LSTM."""
    w_ih, w_hh, b_ih, b_hh = weights
    from_x, from_h = _matmul(x, w_ih.t()), _matmul(h, w_hh.t())
    for part, bias in ((from_x, b_ih), (from_h, b_hh)):
        if bias.numel():
            part += bias
    pre = from_x if kind != GRU else from_x.new_empty(len(x), PRE_ACTIVATIONS * h.shape[1])
    _operators.add_pre_activations(from_x, from_h, pre)
    return pre


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, operands rounded to the dtype of `right`, sums in that of `left`."""
    sums = left.new_empty(left.shape[0], right.shape[1])
    _operators.add_matmul(sums, left.to(right.dtype), right, True)
    return sums
