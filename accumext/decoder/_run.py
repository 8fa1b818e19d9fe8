"""One run of the decoder: what every cell has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from accumext._wgrad_fusion import Destination, defer
from accumext.decoder._arguments import Job
from accumext.decoder._cells import parameter_tensors
from accumext.decoder._fused_cross_entropy import (
    Gradients,
    Head,
    Wants,
    accumulation_dtype,
    plain,
    product_dtype,
)
from accumext.decoder._half_matmul import exps_dtype
from accumext.decoder._plan import Plan, make_plan
from accumext.decoder._recurrent_state import State, tensors, zero_gradient_tie


class Run(ABC):
    """The tokens of one call as they become known."""

    def __init__(self, job: Job) -> None:
        self.job = job
        shape, device = (job.steps, job.batch), job.targets.device
        pad = job.table.pad
        self.tokens = torch.full(shape, pad, device=device)  # int64 [T, B], what was predicted
        self.inputs = torch.full(shape, pad, device=device)  # int64 [T, B], what was fed
        self.losses = torch.zeros(shape, dtype=accumulation_dtype(job.weight.dtype), device=device)
        self.targets = torch.where(job.counted, job.targets, 0).contiguous()  # all of them words
        self.live = job.within  # bool [T, B]: neither past its length nor after its eos; None: all
        if job.eos is not None:
            everyone = torch.ones(shape, dtype=torch.bool, device=device)
            self.live = everyone if job.within is None else job.within.clone()
        self.product_dtype = product_dtype(job.weight)
        self.plan = run_plan(job, self.product_dtype)
        reached = [
            job.table.weight,
            *tensors(job.state),
            *job.context,
            *parameter_tensors(job.cell),
        ]
        self.grad = torch.is_grad_enabled()
        self.cell_grad = self.grad and (
            job.cell.state_shapes is None or any(t.requires_grad for t in reached)
        )

    def __call__(self) -> tuple[Tensor, State]:
        """The reduced loss and the last state."""
        job = self.job
        state = job.state
        if state is None:
            state = job.cell.initial_state(job.batch, job.table.weight)
        if job.targets.numel() == 0:
            return self._nothing(state), state
        self.inputs[0] = self.padded(0, job.feedback.first())
        if not self.by_step:
            self.inputs.copy_(self.padded(slice(None), job.feedback.teacher))
        # Without eos the divisor is known, and the gradients come out divided.
        self.early = None if job.eos is not None else self._inverse_divisor(job.counted)
        self.head = self._new_head()
        return self._run(state)

    @abstractmethod
    def _run(self, state: State) -> tuple[Tensor, State]:
        """Run every step."""

    @property
    def by_step(self) -> bool:
        """Must a step's tokens be known before the next step?"""
        return self.job.feedback.predicts or self.job.eos is not None

    def lengths(self) -> Tensor:
        """Steps until each row ended, int64 [B]."""
        if self.live is None:
            return torch.full((self.job.batch,), self.job.steps, device=self.tokens.device)
        return self.live.sum(0)

    def counted(self, steps: slice = slice(None)) -> Tensor:
        """What has a loss, bool [T, B], as far as is known now."""
        counted = self.job.counted[steps]
        return counted if self.live is None else counted & self.live[steps]

    def push(self, begin: int, end: int, hidden: Tensor) -> None:
        """Outputs [(end - begin) B, H] of these steps through the head: tokens and losses."""
        span, first = slice(begin, end), begin * self.job.batch
        hidden = hidden.detach()
        index = torch.arange(first, end * self.job.batch, device=hidden.device)
        if self.live is not None and self.live.device.type == "cpu":  # elsewhere nothing waits
            live = self.live[span].flatten().nonzero().squeeze(1)
            hidden, index = hidden[live], index[live]
        local = index - first
        uniforms = self.job.feedback.uniforms
        with plain(hidden.device):
            tokens, losses = self.head.push(
                hidden,
                self.targets[span].flatten()[local],
                self.counted(span).flatten()[local],
                index,
                self.early,
                None if uniforms is None else uniforms[span].flatten()[local],
            )
            self.tokens.view(-1)[index] = tokens
            self.losses.view(-1)[index] = losses
            if self.live is not None:
                self.tokens[span] = self.padded(span, self.tokens[span])

    def feed_back(self, step: int) -> None:
        """After a step's tokens: which rows have ended, and what the next step reads."""
        job = self.job
        if step + 1 >= job.steps:
            return
        if job.eos is not None and self.live is not None:
            self.live[step + 1 :] &= self.live[step] & (self.tokens[step] != job.eos)
        following = job.feedback.next(step + 1, self.tokens[step])
        self.inputs[step + 1] = self.padded(step + 1, following)

    def padded(self, steps: int | slice, tokens: Tensor) -> Tensor:
        """The tokens, with padding in the rows that have ended."""
        if self.live is None:
            return tokens
        return torch.where(self.live[steps], tokens, self.job.table.pad)

    def result(self) -> tuple[Tensor, Tensor | None, Gradients | None]:
        """The loss without a graph; the gradients; and between them the factor that these lack,
        None if none."""
        with plain(self.losses.device):
            gradients = self.head.finish()
            del self.head
            inverse = self._inverse_divisor(self.counted()) if self.early is None else self.early
            value = self.losses if self.job.reduction == "none" else self.losses.sum() * inverse
        return value, inverse if self.early is None else None, gradients

    def _new_head(self) -> Head:
        """The head of this pass. Under `reduction="none"` the gradients wait for their upstream,
        and where they go into a main gradient until that is offered."""
        job = self.job
        bias_grad = job.bias is not None and job.bias.requires_grad
        wants = (self.cell_grad, job.weight.requires_grad, bias_grad)
        formed_now = self.grad and job.reduction != "none" and not defer(job.weight)
        with plain(job.weight.device):
            return make_head(job, self.plan, wants if formed_now else None, self.product_dtype)

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
            divisor = torch.where(counted, weights[self.targets], 0).sum()
        else:
            divisor = counted.sum().to(self.losses.dtype)
        return torch.where(divisor == 0, 0, divisor.reciprocal())

    def _nothing(self, state: State) -> Tensor:
        """The loss of an empty window: 0, with a zero gradient for what would have had one."""
        job = self.job
        zero = self.losses if job.reduction == "none" else self.losses.sum()
        reached = [job.table.weight, job.weight, *([] if job.bias is None else [job.bias])]
        reached += [*parameter_tensors(job.cell), *tensors(state), *job.context]
        tie = zero_gradient_tie(reached) if self.grad else None
        return zero if tie is None else zero + tie.to(zero.dtype)


def run_plan(job: Job, compute_dtype: torch.dtype) -> Plan:
    """The sizes of a run of this call."""
    wide = accumulation_dtype(job.weight.dtype)
    words = job.weight.shape[0]
    kept = exps_dtype(compute_dtype, job.weight.device, wide)
    return make_plan(
        job.steps, job.batch, words * wide.itemsize, words * kept.itemsize, job.memory_budget
    )


def make_head(
    job: Job,
    plan: Plan,
    wants: Wants | None,
    dtype: torch.dtype,
    straight: Destination | None = None,
) -> Head:
    """A head for this call."""
    return Head(
        job.weight,
        job.bias,
        job.criterion,
        plan.rows,
        plan.columns,
        job.targets.numel(),
        wants,
        dtype,
        job.feedback.temperature,
        straight,
    )
