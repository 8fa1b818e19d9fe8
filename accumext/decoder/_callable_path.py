"""The path for callable cells: autograd differentiates the cell; head and loss are one node of the
graph after the cell's outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accumext.decoder._callable_steps import CallableSteps, HeadOfSteps
from accumext.decoder._called_head import BeginBackward, reduced
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, NeedsGrad
from accumext.decoder._model import OP, parameters_of
from accumext.decoder._saved_for_backward import SavedForBackward
from accumext.decoder._transcript import Decoded, Transcript
from accumext.recurrence import join, no_grad_no_autocast, parameter_tensors, tensors
from accumext.tensors.checks import check_first_order


def decode_with_callable(transcript: Transcript, return_outputs: bool) -> Decoded:
    """Run a call whose cell is called."""
    model, tokens = transcript.model, transcript.tokens
    grad_enabled, device = torch.is_grad_enabled(), transcript.losses.device
    reached = [model.table.weight, *tensors(tokens.state), *parameter_tensors(model.cell)]
    reached += parameters_of(model.table.module)
    differentiable = model.cell.state_shapes is None or any(t.requires_grad for t in reached)
    differentiable = differentiable or model.called_head is not None
    root, head, takes = model.table.root(), None, None
    if model.called_head is None:
        head = _fused_head(transcript, differentiable)
        takes = HeadOfSteps(transcript, head)
    builds_graph = grad_enabled and differentiable
    steps = CallableSteps(transcript, takes, root, builds_graph, return_outputs)
    del takes  # with its part of the workspace
    segments, last = steps.run()
    outputs = None
    if return_outputs:
        outputs = torch.cat([s.hidden if s.outputs is None else s.outputs for s in segments])
    extras = join(OP, torch.cat, [s.extras for s in segments])
    with no_grad_no_autocast(device):
        gradients = None if head is None else head.finish()
        value, inverse_divisor, lengths = transcript.finish()
    if not grad_enabled:
        return Decoded(value, last, lengths, outputs, extras)
    saved = SavedForBackward(transcript, inverse_divisor, gradients, steps.used)
    loss: Tensor
    if head is None:
        losses = torch.cat([s.losses for s in segments if s.losses is not None])
        value = reduced(transcript, losses, inverse_divisor)
        loss = BeginBackward.apply(saved, value, root)  # type: ignore[no-untyped-call]
    else:
        loss = HeadLoss.apply(  # type: ignore[no-untyped-call]
            saved, value, model.head_weight, model.head_bias, root, *(s.hidden for s in segments)
        )
    return Decoded(loss, last, lengths, outputs, extras)


def _fused_head(transcript: Transcript, differentiable: bool) -> FusedCrossEntropy:
    """The head of the call, whose gradients are formed as early as they can be."""
    model, plan, size = transcript.model, transcript.plan, transcript.losses.numel()
    needs = None
    if torch.is_grad_enabled() and plan.gradients_in_forward:
        bias_grad = model.head_bias is not None and model.head_bias.requires_grad
        needs = NeedsGrad(differentiable, model.head_weight.requires_grad, bias_grad)
    with no_grad_no_autocast(transcript.losses.device):
        return FusedCrossEntropy(model, transcript.objective, plan, size, needs)


class HeadLoss(torch.autograd.Function):
    """The loss as a function of the head's parameters and the cell's outputs.

    Its value and, as a rule, its gradients are known when it is applied. The root of the
    embedding's lookups is an argument, so that its backward runs even if no gradient reaches any.
    """

    @staticmethod
    def forward(
        ctx: Any,
        saved: SavedForBackward,
        value: Tensor,  # 0-dim or [T, B]
        weight: Tensor,
        bias: Tensor | None,
        root: Tensor,
        *hiddens: Tensor,  # [steps, B, H] each
    ) -> Tensor:
        ctx.saved = saved
        ctx.save_for_backward(*hiddens)
        ctx.layout = [(hidden.shape, hidden.dtype) for hidden in hiddens]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order(OP)
        saved: SavedForBackward = ctx.saved
        model = saved.model
        saved.check_unchanged()
        model.table.discard_gradients()
        saved.transcript.gate.begin_backward(upstream)
        needs_weight, needs_bias, needs_root = ctx.needs_input_grad[2:5]
        needs_hidden = ctx.needs_input_grad[5:]
        with no_grad_no_autocast(upstream.device):
            needs = NeedsGrad(any(needs_hidden), needs_weight, needs_bias)
            gradients, main = saved.head_gradients(
                upstream,
                lambda: (hidden.flatten(0, 1) for hidden in ctx.saved_tensors),
                needs,
                not model.tied,
            )
        weight = gradients.weight if needs_weight and main is None else None
        if weight is not None and model.tied:
            # One buffer for both: the rows of the lookups are added to the head's gradient.
            model.table.tied_gradient, weight = weight, None
        d_hiddens: list[Tensor | None] = []
        done = 0
        for (shape, dtype), needed in zip(ctx.layout, needs_hidden, strict=True):
            rows = slice(done, done + shape[0] * shape[1])
            done = rows.stop
            d_hiddens.append(gradients.hidden[rows].view(shape).to(dtype) if needed else None)
        return (
            *(None, None),
            None if weight is None else weight.to(model.head_weight.dtype),
            gradients.bias_like(model.head_bias) if needs_bias else None,
            model.table.weight.new_zeros(0) if needs_root else None,
            *d_hiddens,
        )
