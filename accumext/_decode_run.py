"""One run of the decoder: the cell's steps keep a graph without logits, the head's gradients are formed as it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from accumext._cells import check_output, parameter_tensors, zero_gradient_tie
from accumext._decode_args import OP, Job
from accumext._decode_plan import Plan, make_plan
from accumext._head import Gradients, Head, accumulation_dtype, product_dtype
from accumext._lookup import Table
from accumext._state import State, detach, freeze, replaying, rng_state, tensors


class Run:
    """The tokens of one call as they become known, and the graph of its cell."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.plan = make_plan(job)
        shape, device = (job.steps, job.batch), job.targets.device
        pad = job.table.pad
        self.tokens = torch.full(shape, pad, device=device)  # int64 [T, B], what was predicted
        self.inputs = torch.full(shape, pad, device=device)  # int64 [T, B], what was fed
        self.losses = torch.zeros(shape, dtype=accumulation_dtype(job.weight.dtype), device=device)
        self.live = job.within  # bool [T, B]: neither past its length nor after its eos; None: all
        if job.eos is not None:
            everyone = torch.ones(shape, dtype=torch.bool, device=device)
            self.live = everyone if job.within is None else job.within.clone()
        self._known = 0  # steps whose token is known; later passes over them replay
        self._by_step = job.feedback.predicts or job.eos is not None
        self.product_dtype = product_dtype(job.weight)
        reached = [job.table.weight, *tensors(job.state), *job.context, *parameter_tensors(job.cell)]
        self._grad = torch.is_grad_enabled()
        self._cell_grad = self._grad and (
            job.cell.state_shapes is None or any(t.requires_grad for t in reached)
        )

    def __call__(self) -> tuple[Tensor, State]:
        """The reduced loss and the last state."""
        job = self.job
        anchor = job.table.anchor()
        state = job.state
        if state is None:
            state = job.cell.initial_state(job.batch, job.table.weight)
        if job.targets.numel() == 0:
            return self._nothing(state), state
        self.inputs[0] = self._padded(0, job.feedback.first())
        if not self._by_step:
            self.inputs.copy_(job.feedback.teacher if self.live is None else torch.where(
                self.live, job.feedback.teacher, job.table.pad))
        self.head = self._new_head()
        if job.k2 is None or job.k1 == job.k2 or not self._cell_grad:
            hiddens, state = self._one_pass(anchor, state)
        else:
            hiddens, state = self._overlapping(anchor, state)
        with plain(self.losses.device):
            gradients = self.head.finish()
        del self.head
        return self._loss(anchor, hiddens, gradients), state

    def _one_pass(self, anchor: Tensor, state: State) -> tuple[list[Tensor], State]:
        """k2=None, where the graph goes all the way, and k1 = k2, where it is cut every k1 steps."""
        period = self.job.k1 if self.job.k2 is not None else None
        hiddens = []
        for begin, end in segments(self.job.steps, period, self.plan.segment):
            hidden, state = self._segment(begin, begin, end, state, anchor)
            hiddens.append(hidden)
            if period is not None and end % period == 0:
                state = detach(state)
        return hiddens, state if period is None else detach(state)

    def _overlapping(self, anchor: Tensor, state: State) -> tuple[list[Tensor], State]:
        """k1 < k2: the losses of (e - k1, e] flow back to step e - k2, for every e = k1, 2 k1, ... and T.

        The windows overlap, so one pass without a graph finds the tokens and the states where windows begin, and each
        window's graph then starts from its own detached state.
        """
        k1, k2 = self.job.k1, self.job.k2
        assert k1 is not None and k2 is not None
        ends = [*range(k1, self.job.steps, k1), self.job.steps]
        begins = [max(0, end - k2) for end in ends]
        device, draws = self.losses.device, self.job.cell.draws
        starts: dict[int, tuple[State, tuple[Tensor, ...] | None]] = {}
        last = state
        marks = [*sorted(set(begins)), self.job.steps]
        with torch.no_grad():
            for begin, end in zip(marks, marks[1:], strict=False):
                starts[begin] = (last, rng_state(device) if draws else None)
                for first, stop in segments(end - begin, None, self.plan.segment):
                    _, last = self._segment(begin + first, begin + first, begin + stop, last, anchor)
        starts[0] = (state, starts[0][1])  # with its graph: a window that reaches step 0 reaches the encoder
        hiddens = []
        for begin, previous, end in zip(begins, [0, *ends], ends, strict=False):
            state_then, drawn = starts[begin]
            with replaying(drawn, device):
                hidden, _ = self._segment(begin, previous, end, state_then, anchor)
            hiddens.append(hidden)
        return hiddens, detach(last)

    def _segment(
        self, begin: int, keep: int, end: int, state: State, anchor: Tensor
    ) -> tuple[Tensor, State]:
        """Outputs [end - keep, B, H] of the steps from `keep`, and the state after them; the graph holds only what enters."""
        if not (self._cell_grad and torch.is_grad_enabled()):
            return self._steps(begin, keep, end, state, anchor, *self.job.context)
        outputs: tuple[Tensor, State] = checkpoint(
            self._steps,
            begin,
            keep,
            end,
            state,
            anchor,
            *self.job.context,
            use_reentrant=False,
            preserve_rng_state=self.job.cell.draws,
        )
        return outputs

    def _steps(
        self, begin: int, keep: int, end: int, state: State, anchor: Tensor, *context: Tensor
    ) -> tuple[Tensor, State]:
        job, outputs = self.job, []
        for step in range(begin, end):
            x = job.table.lookup(anchor, self.inputs[step])
            output, new_state = job.cell.step(x, state, *context)
            if step == 0:
                check_output(OP, output, job.batch, job.weight.shape[1])
            if self.live is not None:
                new_state = freeze(OP, self.live[step], new_state, state, job.cell.batch_dim)
            state = new_state
            if step >= keep:
                outputs.append(output)
            if self._by_step and step >= self._known:
                self._predict(step, step + 1, output)
        hidden = torch.stack(outputs)
        if end > self._known:
            self._predict(begin, end, hidden.flatten(0, 1))
        return hidden, state

    def _predict(self, begin: int, end: int, hidden: Tensor) -> None:
        """Push the outputs [(end - begin) B, H] through the head: tokens, losses, and the next input."""
        job, span = self.job, slice(begin, end)
        live = None if self.live is None else self.live[span]
        counted = job.counted[span] if live is None else job.counted[span] & live
        with plain(self.losses.device):
            upstream = counted.flatten().to(self.losses.dtype)
            tokens, losses = self.head.push(hidden, job.targets[span].flatten(), upstream)
            tokens = tokens.view_as(counted)
            self.tokens[span] = tokens if live is None else torch.where(live, tokens, job.table.pad)
            self.losses[span] = losses.view_as(counted)
            self._known = end
            if self._by_step and end < job.steps:
                if job.eos is not None and self.live is not None:
                    self.live[end:] &= self.live[end - 1] & (tokens[-1] != job.eos)
                self.inputs[end] = self._padded(end, job.feedback.next(end, tokens[-1]))

    def _padded(self, step: int, tokens: Tensor) -> Tensor:
        return tokens if self.live is None else torch.where(self.live[step], tokens, self.job.table.pad)

    def _new_head(self) -> Head:
        """The head of the forward pass; under `reduction="none"` the gradients wait for their upstream."""
        job, feedback = self.job, self.job.feedback
        bias_grad = job.bias is not None and job.bias.requires_grad
        wants = (self._cell_grad, job.weight.requires_grad, bias_grad)
        formed_now = self._grad and job.reduction != "none"
        with plain(job.weight.device):
            return Head(
                job.weight,
                job.bias,
                job.criterion,
                self.plan.rows,
                job.targets.numel(),
                wants if formed_now else None,
                self.product_dtype,
                feedback.temperature,
                feedback.generator,
            )

    def _loss(self, anchor: Tensor, hiddens: list[Tensor], gradients: Gradients | None) -> Tensor:
        job = self.job
        counted = job.counted if self.live is None else job.counted & self.live
        with plain(self.losses.device):
            inverse = self._inverse_divisor(counted)
            value = self.losses if job.reduction == "none" else self.losses.sum() * inverse
        if not self._grad:
            return value
        record = Record(job, self.plan, self.product_dtype, counted, inverse, value, gradients)
        loss: Tensor = _HeadLoss.apply(record, job.weight, job.bias, anchor, *hiddens)
        return loss

    def _inverse_divisor(self, counted: Tensor) -> Tensor:
        """1 over what the sum is divided by, 0-dim; 0 where nothing was counted, so that the loss is 0 and not NaN."""
        job = self.job
        if job.reduction != "mean":
            return self.losses.new_ones(())
        if job.num_items is not None:
            divisor = torch.as_tensor(job.num_items).to(self.losses)
        elif job.criterion.class_weight is not None:
            weights = job.criterion.class_weight.to(self.losses.dtype)
            divisor = torch.where(counted, weights[torch.where(counted, job.targets, 0)], 0).sum()
        else:
            divisor = counted.sum().to(self.losses.dtype)
        return torch.where(divisor == 0, 0, divisor.reciprocal())

    def _nothing(self, state: State) -> Tensor:
        """The loss of an empty window: 0, with a zero gradient for everything that would have had one."""
        job = self.job
        zero = self.losses if job.reduction == "none" else self.losses.sum()
        reached = [job.table.weight, job.weight, *([] if job.bias is None else [job.bias])]
        reached += [*parameter_tensors(job.cell), *tensors(state), *job.context]
        tie = zero_gradient_tie(reached) if self._grad else None
        return zero if tie is None else zero + tie.to(zero.dtype)


@dataclass
class Record:
    """What the loss node needs in the backward pass."""

    job: Job
    plan: Plan
    product_dtype: torch.dtype
    counted: Tensor  # bool [T, B]
    inverse: Tensor  # 0-dim, 1 / divisor
    value: Tensor
    gradients: Gradients | None  # of the summed loss; given away in the first backward pass

    def scaled(self, upstream: Tensor, hiddens: list[Tensor], wants: tuple[bool, bool, bool]) -> Gradients:
        """The gradients under an upstream gradient: those at hand, else from the kept outputs of the cell.

        The outputs serve `reduction="none"`, whose upstream is per token, and a second backward pass of a retained graph.
        """
        gradients, self.gradients = self.gradients, None
        factor = upstream.to(self.inverse.dtype) * self.inverse
        if gradients is not None:
            gradients.scale(factor)
            return gradients
        job = self.job
        head = Head(
            job.weight, job.bias, job.criterion, self.plan.rows, job.targets.numel(), wants, self.product_dtype
        )
        rows = (factor * self.counted).flatten()
        begin = 0
        for hidden in hiddens:
            span = slice(begin, begin + hidden.shape[0] * hidden.shape[1])
            head.push(hidden.flatten(0, 1), job.targets.flatten()[span], rows[span])
            begin = span.stop
        formed = head.finish()
        assert formed is not None  # the node runs only where a gradient is wanted
        return formed


class _HeadLoss(torch.autograd.Function):
    """The loss as a function of the cell's outputs and the head, its gradients already formed."""

    @staticmethod
    def forward(
        ctx: Any, record: Record, weight: Tensor, bias: Tensor | None, anchor: Tensor, *hiddens: Tensor
    ) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(*hiddens)
        ctx.sizes = [(h.shape, h.dtype) for h in hiddens]
        return record.value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        record: Record = ctx.record
        job = record.job
        wants = (any(ctx.needs_input_grad[4:]), *ctx.needs_input_grad[1:3])
        hiddens = ctx.saved_tensors if record.gradients is None else []
        with plain(upstream.device):
            gradients = record.scaled(upstream, hiddens, wants)
        weight, bias = gradients.weight, gradients.bias
        if weight is not None and job.weight is job.table.weight:
            job.table.tied, weight = weight, None  # the lookups' rows are added to it: one buffer for both
        d_hiddens: list[Tensor | None] = []
        begin = 0
        for (shape, dtype), wanted in zip(ctx.sizes, ctx.needs_input_grad[4:], strict=True):
            rows = slice(begin, begin + shape[0] * shape[1])
            begin = rows.stop
            d_hiddens.append(gradients.hidden[rows].view(shape).to(dtype) if wanted else None)
        return (
            None,
            None if weight is None else weight.to(job.weight.dtype),
            None if bias is None or job.bias is None else bias.to(job.bias.dtype),
            weight_anchor(job.table, ctx.needs_input_grad[3]),
            *d_hiddens,
        )


def weight_anchor(table: Table, wanted: bool) -> Tensor | None:
    """The anchor's empty gradient, which makes the lookups' turn come even if no lookup was reached."""
    return table.weight.new_zeros(0) if wanted else None


def segments(steps: int, period: int | None, longest: int) -> Iterator[tuple[int, int]]:
    """[begin, end) over the steps, at most `longest` long, with a border at every multiple of `period`."""
    begin = 0
    while begin < steps:
        end = min(begin + longest, steps)
        if period is not None:
            end = min(end, begin - begin % period + period)
        yield begin, end
        begin = end


@contextmanager
def plain(device: torch.device) -> Iterator[None]:
    """No graph and no autocast: the head chooses its own precision."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
