"""The backward pass of a run with one of torch's recurrent modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accumext._wgrad_fusion import destination
from accumext.decoder import _operators
from accumext.decoder._arguments import Job
from accumext.decoder._plan import cell_steps
from accumext.decoder._rnn_weights import GRU, Layers, pre_activations
from accumext.decoder._saved_for_backward import Record


class LayersBackward:
    """Serial over steps and layers is only what depends on the step behind: the rest is products
    over many steps, added into one buffer per weight."""

    def __init__(
        self,
        record: Record,
        needs: tuple[bool, ...],  # of Rollout's arguments
        upstream: Tensor,  # 0-dim or [T, B]
        d_last: tuple[Tensor | None, ...],  # of the last state
    ) -> None:
        run: Any = record.run
        self.run, self.record, self.upstream, self.d_last = run, record, upstream, d_last
        self.layers: Layers = run.layers
        self.job: Job = run.job
        parts = self.layers.parts
        self.needs_weight, self.needs_bias, self.needs_table = needs[1:4]
        self.needs_state, self.needs_cell = needs[5 : 5 + parts], needs[5 + parts :]
        self.gates = (3, 4, 1, 1)[self.layers.kind]

    def __call__(self) -> tuple[Any, ...]:
        """The gradients of Rollout's arguments."""
        job, run = self.job, self.run
        through_cell = self.needs_table or any(self.needs_state) or any(self.needs_cell)
        outputs = run.states[-self.layers.parts][1:].flatten(0, 1)
        wants = (through_cell, self.needs_weight, self.needs_bias)
        dtype = run.losses.dtype
        into = None
        if self.needs_weight and not self.record.at_hand:
            into = destination(job.weight, dtype)
        gradients = self.record.scaled(self.upstream, [outputs], wants, into)
        tied = job.weight is job.table.weight
        self.into_table = into if tied else None
        if self.needs_table and not tied and not job.table.sparse:
            self.into_table = destination(job.table.weight, dtype)
        self._start(gradients.weight if tied else None)
        if through_cell:
            self.d_out = gradients.hidden.view(job.steps, job.batch, -1)
            self._through_time()
        weight = gradients.weight if self.needs_weight and not tied and into is None else None
        bias = gradients.bias if self.needs_bias else None
        return (
            None,
            None if weight is None else weight.to(job.weight.dtype),
            None if bias is None or job.bias is None else bias.to(job.bias.dtype),
            self._table_gradient(),
            None,
            *self._state_gradients(),
            *self._weight_gradients(),
        )

    def _start(self, tied: Tensor | None) -> None:
        """Zeros for what is added up."""
        run, job = self.run, self.job
        like = run.states[0]
        self.d_weights = [w.new_zeros(w.shape) for w in run.weights]
        # Transposed, since the product takes rows of the result.
        self.to_h = [run.weights[4 * i + 1].t().contiguous() for i in range(self.layers.count)]
        self.d_first = [like.new_zeros(like.shape[1:]) for _ in run.states]
        self.d_table, self.d_rows = tied, None
        if not self.needs_table or tied is not None:
            return
        if self.into_table is not None:
            self.d_table = self.into_table.main_grad
        elif job.table.sparse:
            self.d_rows = like.new_zeros(job.steps, job.batch, job.table.weight.shape[1])
        else:
            self.d_table = like.new_zeros(job.table.weight.shape)

    def _through_time(self) -> None:
        job = self.job
        for begin, counting, end in job.windows():
            carried = [torch.zeros_like(d) for d in self.d_first]
            if not job.truncated:
                self._take_last(carried)
            # of whole chunks, the last is the one at the beginning
            steps = cell_steps(job.batch)
            for stop in range(end, begin, -steps):
                start = max(begin, stop - steps)
                self._chunk(start, stop, counting, carried)
            if begin == 0:
                for total, part in zip(self.d_first, carried, strict=True):
                    total += part

    def _take_last(self, carried: list[Tensor]) -> None:
        """The gradient that the caller brings for the last state."""
        for part, given in enumerate(self.d_last):
            if given is None:
                continue
            for layer in range(self.layers.count):
                own = given[layer] if self.layers.stacked else given
                carried[layer * self.layers.parts + part] += own

    def _chunk(self, begin: int, end: int, counting: int, carried: list[Tensor]) -> None:
        """Steps [begin, end) backward; losses before step `counting` are another window's."""
        run, job, layers = self.run, self.job, self.layers
        span = slice(begin, end)
        d_out = self.d_out[span]
        if counting > begin:
            d_out = d_out.clone()
            d_out[: counting - begin] = 0
        carry = self._carry(begin, end)
        for layer in reversed(range(1, layers.count)):
            d_gates = self._layer(layer, begin, end, d_out, carry, carried)
            d_out = torch.mm(d_gates, run.weights[4 * layer]).view(end - begin, job.batch, -1)
            del d_gates
            if run.kept is not None:
                d_out.mul_(run.kept[span, layer - 1]).mul_(run.kept_scale)
        d_gates = self._layer(0, begin, end, d_out, carry, carried)
        if self.needs_table:
            self._add_rows(span, torch.mm(d_gates, run.weights[0]))

    def _layer(
        self,
        layer: int,
        begin: int,
        end: int,
        d_out: Tensor,
        carry: Tensor | None,
        carried: list[Tensor],
    ) -> Tensor:
        """One layer's steps [begin, end) backward; gradients of x's part in its gates, [n B, G]."""
        run, job, layers = self.run, self.job, self.layers
        span, around = slice(begin, end), slice(begin, end + 1)
        own = layer * layers.parts
        h = run.states[own][around]
        c = run.states[own + 1][around] if layers.parts == 2 else None
        x = self._inputs(layer, span)
        weights = run.weights[4 * layer : 4 * layer + 4]
        before = h[:-1].flatten(0, 1)
        pre = None
        if self.gates > 1:
            pre = pre_activations(layers.kind, x, before, weights)
            pre = pre.view(end - begin, job.batch, -1)
        d_x = d_out.new_empty(end - begin, job.batch, self.gates * layers.units)
        d_h = torch.empty_like(d_x) if layers.kind == GRU else None
        _operators.rnn_backward(
            layers.kind,
            d_out.contiguous(),
            pre,
            h,
            c,
            None if run.live is None else run.live[span],
            carry,
            job.carry.limit,
            self.to_h[layer],
            carried[own],
            carried[own + 1] if c is not None else None,
            d_x,
            d_h,
        )
        d_x = d_x.flatten(0, 1)
        self._add_weights(layer, x, before, d_x, d_x if d_h is None else d_h.flatten(0, 1))
        return d_x

    def _carry(self, begin: int, end: int) -> Tensor | None:
        job, factors = self.job, self.job.carry.factors
        dtype = self.d_out.dtype
        if factors is not None:
            return factors[begin:end].to(dtype)
        if job.k2 is None or job.k1 != job.k2:
            return None
        borders = torch.arange(begin, end, device=self.d_out.device) % job.k1 != 0
        borders[0] |= begin == 0  # the initial state is not cut off
        return borders.to(dtype)[:, None].repeat(1, job.batch)

    def _inputs(self, layer: int, span: slice) -> Tensor:
        """What the layer read in these steps, [n B, inputs]."""
        run, parts = self.run, self.layers.parts
        if layer == 0:
            rows: Tensor = run.table[run.inputs[span].flatten()].to(run.states[0].dtype)
            return rows
        below: Tensor = run.states[(layer - 1) * parts][span.start + 1 : span.stop + 1]
        if run.kept is not None:
            below = below * run.kept[span, layer - 1] * run.kept_scale
        return below.flatten(0, 1)

    def _add_weights(self, layer: int, x: Tensor, h: Tensor, d_x: Tensor, d_h: Tensor) -> None:
        w_ih, w_hh, b_ih, b_hh = self.d_weights[4 * layer : 4 * layer + 4]
        w_ih.addmm_(d_x.t(), x)
        w_hh.addmm_(d_h.t(), h)
        if b_ih.numel():
            b_ih += d_x.sum(0)
        if b_hh.numel():
            b_hh += d_h.sum(0)

    def _add_rows(self, span: slice, gradient: Tensor) -> None:
        """The gradient [n B, E] of the rows that were looked up."""
        tokens = self.run.inputs[span].flatten()
        if self.job.table.padding_idx is not None:
            gradient.masked_fill_((tokens == self.job.table.padding_idx)[:, None], 0)
        if self.into_table is not None:
            gradient.mul_(self.into_table.factor)
        if self.d_rows is not None:
            self.d_rows[span] += gradient.view_as(self.d_rows[span])
        elif self.d_table is not None:
            self.d_table.index_add_(0, tokens, gradient)

    def _table_gradient(self) -> Tensor | None:
        table = self.job.table.weight
        if not self.needs_table or self.into_table is not None:
            return None
        if self.d_rows is not None:
            tokens = self.run.inputs.flatten()[None]
            rows = self.d_rows.flatten(0, 1).to(table.dtype)
            return torch.sparse_coo_tensor(tokens, rows, table.shape, check_invariants=False)
        assert self.d_table is not None
        return self.d_table.to(table.dtype)

    def _state_gradients(self) -> list[Tensor | None]:
        layers = self.layers
        gradients: list[Tensor | None] = []
        for part, needed in enumerate(self.needs_state):
            of_layers = self.d_first[part :: layers.parts]
            gradient = torch.stack(of_layers) if layers.stacked else of_layers[0]
            gradients.append(gradient.to(self.run.state_dtypes[part]) if needed else None)
        return gradients

    def _weight_gradients(self) -> list[Tensor | None]:
        given = [
            (weight, gradient)
            for weight, gradient in zip(self.layers.weights, self.d_weights, strict=True)
            if weight is not None
        ]
        return [
            gradient.to(weight.dtype) if needed else None
            for (weight, gradient), needed in zip(given, self.needs_cell, strict=True)
        ]
