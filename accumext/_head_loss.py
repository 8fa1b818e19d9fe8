"""The loss as a node of the graph: a function of the cell's outputs and the head, its gradients
known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accumext._cells import parameter_tensors
from accumext._checks import message
from accumext._decode_args import OP, Job
from accumext._decode_plan import Plan
from accumext._head import Gradients, Head, Wants, plain


@dataclass
class Record:
    """What the loss node needs in the backward pass."""

    job: Job
    plan: Plan
    product_dtype: torch.dtype
    counted: Tensor  # bool [T, B]
    inverse: Tensor  # 0-dim, 1 / divisor
    value: Tensor  # the loss, 0-dim or [T, B]
    gradients: Gradients | None  # of the summed loss; given away in the first backward pass

    def __post_init__(self) -> None:
        self._seen = [(tensor, tensor._version) for tensor in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        """What the backward pass reads again. A table with a maximal norm is written by lookups."""
        job = self.job
        table = [] if job.table.max_norm is not None else [job.table.weight]
        head = [job.weight, *([] if job.bias is None else [job.bias])]
        return [*table, *head, *parameter_tensors(job.cell)]

    def check_unchanged(self) -> None:
        """Raise, as autograd would, if a parameter was written or replaced since the forward."""
        now = self._parameters()
        if len(now) != len(self._seen) or any(
            tensor is not then or tensor._version != version
            for tensor, (then, version) in zip(now, self._seen, strict=True)
        ):
            contract = "be those of the forward pass until the backward pass has run"
            raise RuntimeError(message(OP, "parameters", contract, "changed ones"))

    def scaled(self, upstream: Tensor, hiddens: tuple[Tensor, ...], wants: Wants) -> Gradients:
        """The gradients under an upstream gradient, 0-dim or [T, B].

        They are at hand the first time. They are formed again from the cell's outputs for
        `reduction="none"`, whose upstream is per token, and when a retained graph runs twice.
        """
        gradients, self.gradients = self.gradients, None
        factor = upstream.to(self.inverse.dtype) * self.inverse
        if gradients is not None:
            gradients.scale(factor)
            return gradients
        job, targets = self.job, self.job.targets.flatten()
        head = Head(
            job.weight,
            job.bias,
            job.criterion,
            self.plan.rows,
            targets.numel(),
            wants,
            self.product_dtype,
        )
        rows = (factor * self.counted).flatten()
        done = 0
        for hidden in hiddens:
            span = slice(done, done + hidden.shape[0] * hidden.shape[1])
            head.push(hidden.flatten(0, 1), targets[span], rows[span])
            done = span.stop
        formed = head.finish()
        assert formed is not None  # wants was given
        return formed


class HeadLoss(torch.autograd.Function):
    """Hands the gradients on, times the upstream gradient."""

    @staticmethod
    def of(record: Record, anchor: Tensor, hiddens: list[Tensor]) -> Tensor:
        """The loss, connected to the head, the lookups' anchor and the cell's outputs."""
        job = record.job
        loss: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
            record, job.weight, job.bias, anchor, *hiddens
        )
        return loss

    @staticmethod
    def forward(
        ctx: Any,
        record: Record,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        *hiddens: Tensor,  # [steps, B, H] each
    ) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(*hiddens)
        ctx.layout = [(hidden.shape, hidden.dtype) for hidden in hiddens]
        return record.value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        record, job = ctx.record, ctx.record.job
        record.check_unchanged()
        job.table.forget()
        needs_weight, needs_bias, needs_anchor = ctx.needs_input_grad[1:4]
        needs_hidden = ctx.needs_input_grad[4:]
        hiddens = ctx.saved_tensors if record.gradients is None else ()
        with plain(upstream.device):
            wants = (any(needs_hidden), needs_weight, needs_bias)
            gradients = record.scaled(upstream, hiddens, wants)
        weight = gradients.weight if needs_weight else None
        if weight is not None and job.weight is job.table.weight:
            job.table.tied, weight = weight, None  # one buffer: the lookups' rows are added to it
        d_hiddens: list[Tensor | None] = []
        done = 0
        for (shape, dtype), needed in zip(ctx.layout, needs_hidden, strict=True):
            rows = slice(done, done + shape[0] * shape[1])
            done = rows.stop
            d_hiddens.append(gradients.hidden[rows].view(shape).to(dtype) if needed else None)
        return (
            None,
            None if weight is None else weight.to(job.weight.dtype),
            gradients.bias.to(job.bias.dtype) if needs_bias else None,
            # the anchor's turn must come even if the cell led no gradient to any lookup
            job.table.weight.new_zeros(0) if needs_anchor else None,
            *d_hiddens,
        )
