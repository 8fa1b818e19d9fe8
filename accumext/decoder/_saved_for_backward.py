"""The loss as a node of the graph: a function of the cell's outputs and the head, its gradients
known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from accumext._checks import message
from accumext._wgrad_fusion import Destination, destination
from accumext.decoder._arguments import OP
from accumext.decoder._cells import parameter_tensors
from accumext.decoder._fused_cross_entropy import Gradients, Wants, plain
from accumext.decoder._run import Run, make_head


class Record:
    """What the backward pass needs of a run."""

    def __init__(
        self,
        run: Run,
        value: Tensor,  # the loss, 0-dim or [T, B]
        missing: Tensor | None,  # factor that the gradients lack, 0-dim; None: 1
        gradients: Gradients | None,  # of the summed loss; given away in the first backward pass
    ) -> None:
        self.run, self.value = run, value
        self._missing, self._gradients = missing, gradients
        self._counted = run.counted()
        self._seen = [(tensor, tensor._version) for tensor in self._parameters()]

    @property
    def at_hand(self) -> bool:
        """Whether the gradients have been formed, and not yet given away."""
        return self._gradients is not None

    def _parameters(self) -> list[Tensor]:
        """What the backward pass reads again. A table with a maximal norm is written by lookups."""
        job = self.run.job
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

    def scaled(
        self,
        upstream: Tensor,
        hiddens: Sequence[Tensor],
        wants: Wants,
        straight: Destination | None = None,  # where the weight's gradient is to go
    ) -> Gradients:
        """The gradients under an upstream gradient, 0-dim or [T, B].

        They are at hand the first time. They are formed again from the cell's outputs, [n, H] each
        and [T B, H] together, for `reduction="none"`, whose upstream is per token, and when a
        retained graph runs twice.
        """
        gradients, self._gradients = self._gradients, None
        factor = upstream.to(self.run.losses.dtype)
        if gradients is not None:
            gradients.scale(factor if self._missing is None else factor * self._missing)
            return gradients
        run, job = self.run, self.run.job
        inverse = run.early if self._missing is None else self._missing
        assert inverse is not None  # one of the two is
        rows = (factor * inverse).expand(self._counted.shape).flatten()
        head = make_head(job, run.plan, wants, run.product_dtype, straight)
        done = 0
        for hidden in hiddens:
            span = slice(done, done + len(hidden))
            index = torch.arange(span.start, span.stop, device=hidden.device)
            counted = self._counted.flatten()[span]
            if counted.device.type == "cpu":  # elsewhere nothing waits to count them
                index = index[counted]
            local = index - done
            head.push(
                hidden[local], run.targets.flatten()[index], counted[local], index, rows[index]
            )
            done = span.stop
        formed = head.finish()
        assert formed is not None  # wants was given
        return formed


class HeadLoss(torch.autograd.Function):
    """Hands the gradients on, times the upstream gradient."""

    @staticmethod
    def of(record: Record, anchor: Tensor, hiddens: list[Tensor]) -> Tensor:
        """The loss, connected to the head, the lookups' anchor and the cell's outputs."""
        job = record.run.job
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
        record, job = ctx.record, ctx.record.run.job
        record.check_unchanged()
        job.table.forget()
        job.carry.backward_begins(upstream)
        needs_weight, needs_bias, needs_anchor = ctx.needs_input_grad[1:4]
        needs_hidden = ctx.needs_input_grad[4:]
        hiddens = [] if record.at_hand else [h.flatten(0, 1) for h in ctx.saved_tensors]
        tied = job.weight is job.table.weight
        straight = None
        if needs_weight and not tied and not record.at_hand:
            straight = destination(job.weight, record.run.losses.dtype)
        with plain(upstream.device):
            wants = (any(needs_hidden), needs_weight, needs_bias)
            gradients = record.scaled(upstream, hiddens, wants, straight)
        weight = gradients.weight if needs_weight and straight is None else None
        if weight is not None and tied:
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
