"""One run of the decoder: the cell's graph without logits, the head's gradients as it goes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accumext._cells import check_output, parameter_tensors
from accumext._decode_args import OP, Job
from accumext._decode_plan import make_plan
from accumext._head import Gradients, Head, accumulation_dtype, plain, product_dtype
from accumext._head_loss import HeadLoss, Record
from accumext._state import (
    State,
    detach,
    freeze,
    replaying,
    rng_state,
    tensors,
    zero_gradient_tie,
)


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
        reached = [
            job.table.weight,
            *tensors(job.state),
            *job.context,
            *parameter_tensors(job.cell),
        ]
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
            self.inputs.copy_(self._padded(slice(None), job.feedback.teacher))
        self.head = self._new_head()
        if job.k2 is None or job.k1 == job.k2 or not self._cell_grad:
            hiddens, state = self._one_pass(anchor, state)
        else:
            hiddens, state = self._overlapping(anchor, state)
        with plain(self.losses.device):
            gradients = self.head.finish()
        del self.head
        return self._loss(anchor, hiddens, gradients), state

    def lengths(self) -> Tensor:
        """Steps until each row ended, int64 [B]."""
        if self.live is None:
            return torch.full((self.job.batch,), self.job.steps, device=self.tokens.device)
        return self.live.sum(0)

    def _one_pass(self, anchor: Tensor, state: State) -> tuple[list[Tensor], State]:
        """Without k2, where the graph goes all the way, and k1 = k2, where it is cut there."""
        period = self.job.k1 if self.job.k2 is not None else None
        hiddens = []
        for begin, end in segments(self.job.steps, period, self.plan.segment):
            hidden, state = self._segment(begin, begin, end, state, anchor)
            hiddens.append(hidden)
            if period is not None and end % period == 0:
                state = detach(state)
        return hiddens, state if period is None else detach(state)

    def _overlapping(self, anchor: Tensor, state: State) -> tuple[list[Tensor], State]:
        """k1 < k2: the losses of [e - k1, e) flow back to step e - k2, for e = k1, 2 k1, ... and T.

        The windows overlap, so one pass without a graph finds the tokens and the states where
        windows begin, and each window's graph then starts from its own detached state.
        """
        k1, k2 = self.job.k1, self.job.k2
        assert k1 is not None
        assert k2 is not None
        ends = [*range(k1, self.job.steps, k1), self.job.steps]
        begins = [max(0, end - k2) for end in ends]
        device, draws = self.losses.device, self.job.cell.draws
        starts: dict[int, tuple[State, tuple[Tensor, ...] | None]] = {}
        last = state
        marks = [*sorted(set(begins)), self.job.steps]
        with torch.no_grad():
            for mark, following in pairwise(marks):
                starts[mark] = (last, rng_state(device) if draws else None)
                for first, stop in segments(following - mark, None, self.plan.segment):
                    begin, end = mark + first, mark + stop
                    _, last = self._segment(begin, begin, end, last, anchor)
        starts[0] = (state, starts[0][1])  # with its graph: windows from step 0 reach the encoder
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
        """Outputs [end - keep, B, H] of the steps from `keep`, and the state after the last.

        The graph holds only what enters: the backward pass runs the steps again.
        """
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
        """Push outputs [(end - begin) B, H] through the head: tokens, losses, the next input."""
        job, span = self.job, slice(begin, end)
        live = None if self.live is None else self.live[span]
        counted = job.counted[span] if live is None else job.counted[span] & live
        with plain(self.losses.device):
            upstream = counted.flatten().to(self.losses.dtype)
            tokens, losses = self.head.push(hidden, job.targets[span].flatten(), upstream)
            tokens = tokens.view_as(counted)
            self.tokens[span] = self._padded(span, tokens)
            self.losses[span] = losses.view_as(counted)
            self._known = end
            if self._by_step and end < job.steps:
                if job.eos is not None and self.live is not None:
                    self.live[end:] &= self.live[end - 1] & (tokens[-1] != job.eos)
                self.inputs[end] = self._padded(end, job.feedback.next(end, tokens[-1]))

    def _padded(self, steps: int | slice, tokens: Tensor) -> Tensor:
        """The tokens, with padding in the rows that have ended."""
        if self.live is None:
            return tokens
        return torch.where(self.live[steps], tokens, self.job.table.pad)

    def _new_head(self) -> Head:
        """The head of this pass; under `reduction="none"` the gradients wait for their upstream."""
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
        return HeadLoss.of(record, anchor, hiddens)

    def _inverse_divisor(self, counted: Tensor) -> Tensor:
        """1 / the divisor of the sum, 0-dim; 0 where nothing counts, so that the loss is not
        NaN."""
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
        """The loss of an empty window: 0, with a zero gradient for what would have had one."""
        job = self.job
        zero = self.losses if job.reduction == "none" else self.losses.sum()
        reached = [job.table.weight, job.weight, *([] if job.bias is None else [job.bias])]
        reached += [*parameter_tensors(job.cell), *tensors(state), *job.context]
        tie = zero_gradient_tie(reached) if self._grad else None
        return zero if tie is None else zero + tie.to(zero.dtype)


def segments(steps: int, period: int | None, longest: int) -> Iterator[tuple[int, int]]:
    """[begin, end) over the steps, at most `longest` long, with borders at multiples of
    `period`."""
    begin = 0
    while begin < steps:
        end = min(begin + longest, steps)
        if period is not None:
            end = min(end, begin - begin % period + period)
        yield begin, end
        begin = end
