"""The backward pass through torch's recurrent modules and the embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from accumext import _scalars
from accumext.decoder import _operators
from accumext.decoder._fused_cross_entropy import new_buffer
from accumext.decoder._memory import backward_steps
from accumext.decoder._rnn_buffers import RnnBuffers
from accumext.decoder._token_buffers import TokenBuffers
from accumext.recurrence import GRU, module_state


class ThroughTime:
    """The backward pass through the cell and the embedding.

    Only what depends on the step after it is serial over steps and layers. The rest are products
    over many steps, added into one buffer per weight.
    """

    def __init__(
        self,
        tokens: TokenBuffers,
        buffers: RnnBuffers,
        needs_table: bool,
        d_table: Tensor | None,  # [R, E]: the tied head's gradient, to add to
        table_main: Tensor | None,  # the main gradient to add the table's gradient to
    ) -> None:
        self._args, self._tokens, self._buffers = tokens.args, tokens, buffers
        self._rnn, self._states = buffers.rnn, buffers.states
        self._needs_table, self._table_main = needs_table, table_main
        new_zeros, table = self._states[0].new_zeros, self._args.table
        self._d_weights = [new_zeros(w.shape) for w in buffers.weights]
        # weight_hh of every layer, transposed; kernels of a CPU take it as it lies
        self._transposed = [w.t() for w in buffers.weights[1::4]]
        if not _scalars.on_host(self._states[0]):
            self._transposed = [w.contiguous() for w in self._transposed]
        self._d_state = [new_zeros(state.shape[1:]) for state in self._states]
        self._d_table = d_table
        self._d_rows: Tensor | None = None  # [T, B, E]: of a sparse gradient
        if needs_table and d_table is None:
            if table_main is not None:
                self._d_table = table_main
            elif table.sparse:
                width = table.weight.shape[1]
                self._d_rows = new_zeros(self._args.steps, self._args.batch, width)
            else:
                dtype = self._args.dtypes.accumulation
                self._d_table = new_buffer(table.weight, *table.weight.shape, dtype=dtype).zero_()

    def run(
        self,
        d_head: Tensor,  # [T, B, H]: gradient of what the head read
        d_outputs: Tensor | None,  # [T, B, H]: of the outputs where they were returned
        d_last: tuple[Tensor | None, ...],
    ) -> None:
        """Every window, from the gradients of the outputs and of the last state."""
        args, parts, stacked = self._args, self._rnn.state_parts, self._rnn.stacked
        for begin, counting, end in args.windows():
            d_state = [torch.zeros_like(d) for d in self._d_state]
            for part, given in enumerate(() if args.truncated else d_last):
                if given is not None:
                    for d, of_layer in zip(d_state[part::parts], given if stacked else [given]):
                        d += of_layer
            for first, last in self._spans(begin, end):
                # in whole chunks from the end; the one at the beginning may be shorter
                size = backward_steps(args.device.type, args.batch)
                for stop in range(last, first, -size):
                    span = slice(max(first, stop - size), stop)
                    with self._buffers.reset_before(span.start, self._tokens.live):
                        d_out = self._buffers.of_outputs.apply(d_head[span], span)
                        if d_outputs is not None:
                            d_out = d_out + d_outputs[span]
                        self._chunk(span, counting, d_out, d_state)
                self._take_resets(first, d_state)
            if begin == 0:
                for total, gradient in zip(self._d_state, d_state, strict=True):
                    total += gradient

    def _spans(self, begin: int, end: int) -> list[tuple[int, int]]:
        """[begin, end) in pieces, within which no row is reset but before the first step, from the
        last piece to the first."""
        resets = self._buffers.resets
        return [(begin, end)] if resets is None else [*resets.spans(begin, end)][::-1]

    def _take_resets(self, step: int, d_state: list[Tensor]) -> None:
        """The gradients of rows that were reset before `step` are the initial state's."""
        resets = self._buffers.resets
        if resets is None or step not in resets.steps:
            return
        anew = resets.at(step, self._tokens.live)[:, None]
        for total, gradient in zip(self._d_state, d_state, strict=True):
            total += torch.where(anew, gradient, 0)
            gradient.masked_fill_(anew, 0)

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
            if buffers.between.mask is not None:
                d_out.mul_(buffers.between.mask[span, layer - 1]).mul_(buffers.between.scale)
        d_gates = self._layer(0, span, d_out, factors, d_state)
        if self._needs_table:
            d_x = _matmul(d_gates, buffers.weights[0]).view(*d_out.shape[:2], -1)
            self._add_to_table(span, buffers.of_inputs.apply(d_x, span).flatten(0, 1))

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
        del pre  # makes room for the copies of d_x and d_h in half precision
        d_x = d_x.flatten(0, 1)
        d_h = d_x if d_h is None else d_h.flatten(0, 1)
        w_ih, w_hh, b_ih, b_hh = self._d_weights[4 * layer : 4 * layer + 4]
        _operators.add_matmul(w_ih, d_x.t().to(weights[0].dtype), x, False)
        _operators.add_matmul(w_hh, d_h.t().to(weights[1].dtype), before, False)
        # A product: on a GPU torch's sum over rows can take as much memory as the rows.
        ones = d_x.new_ones(d_x.shape[0])
        if b_ih.numel():
            b_ih.addmv_(d_x.t(), ones)
        if b_hh.numel():
            b_hh.addmv_(d_h.t(), ones)
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
        kept = passes[:, None].repeat(1, args.batch)
        if args.resets is not None:
            kept |= args.resets.rows[span]
        return kept.to(like.dtype)

    def _inputs(self, layer: int, span: slice) -> Tensor:
        """What the layer read in these steps, [n B, E or H]."""
        buffers = self._buffers
        if layer == 0:
            rows = buffers.table[self._tokens.inputs[span]].to(self._states[0].dtype)
            return buffers.of_inputs.apply(rows, span).flatten(0, 1)
        below = self._states[(layer - 1) * self._rnn.state_parts][span.start + 1 : span.stop + 1]
        if buffers.between.mask is not None:
            below = below * buffers.between.mask[span, layer - 1] * buffers.between.scale
        return below.flatten(0, 1)

    def _add_to_table(self, span: slice, gradient: Tensor) -> None:
        """Add the gradient [n B, E] of the rows that these steps looked up."""
        tokens, table = self._tokens.inputs[span].flatten(), self._args.table
        if table.padding_idx is not None:
            gradient.masked_fill_((tokens == table.padding_idx)[:, None], 0)
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
        gradients = module_state(self._rnn, self._d_state, self._buffers.state_dtypes)
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
