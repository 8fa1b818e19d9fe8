"""A head that is called, since it does more than its formula. It is called at every step, by the
replays of steps as well, and autograd differentiates the losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder._model import OP, Model
from accumext.decoder._objective import Objective
from accumext.decoder._operators import logits_of
from accumext.decoder._saved_for_backward import SavedForBackward
from accumext.decoder._transcript import Transcript
from accumext.recurrence import no_autocast, sample
from accumext.tensors.checks import check_first_order, fail_type, fail_value, type_name


def called_logits(op: str, model: Model, hidden: Tensor) -> Tensor:
    """The logits [M, V] of a head that is called, in the accumulation dtype."""
    assert model.called_head is not None
    logits: Any = model.called_head(hidden)
    if not isinstance(logits, Tensor):
        fail_type(op, "head", "return a tensor of logits", type_name(logits))
    shape = [len(hidden), len(model.head_weight)]
    if list(logits.shape) != shape:
        fail_value(op, "head", f"return logits of shape {shape}", list(logits.shape))
    return logits.to(model.dtypes.accumulation)


def called_head_losses(transcript: Transcript, step: int, hidden: Tensor, known: bool) -> Tensor:
    """The losses [B] of a step, with a graph, from what the head reads, [B, H]. If the token of the
    step is not known yet, it is chosen."""
    objective, source = transcript.objective, transcript.source
    logits = called_logits(OP, transcript.model, hidden)
    with no_autocast(logits.device):
        if not known:
            found = logits.detach()
            tokens = found.max(1).indices
            if source.uniforms is not None:
                tokens = sample(found, source.uniforms[step], source.temperature)
            transcript.predicted[step] = transcript.padded(step, tokens)
        batch = len(hidden)
        rows = torch.arange(step * batch, (step + 1) * batch, device=hidden.device)
        targets = transcript.targets[step].clone()  # of later steps, they are written yet
        losses = losses_of_logits(objective, logits, targets, rows)
        counted = transcript.counted(slice(step, step + 1))[0]
        entropies = None
        if objective.entropy_weight != 0:
            entropies = entropies_of(logits)
            losses = losses - objective.entropy_weight * entropies
        losses = torch.where(counted, losses, 0)
        if not known:  # a replay leaves the results alone
            transcript.losses[step] = losses.detach()
            if transcript.entropies is not None and entropies is not None:
                transcript.entropies[step] = torch.where(counted, entropies.detach(), 0)
    return losses


def entropies_of(logits: Tensor) -> Tensor:
    """The entropies of the distributions of logits [M, V]; those of -inf have no gradient."""
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0)).sum(1)


def losses_of_logits(objective: Objective, logits: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """The losses of logits [M, V] by their definition, but for the entropies; `rows` are those of
    all T B rows."""
    weight = objective.class_weight
    losses = (1 - objective.soft_weight) * F.cross_entropy(
        logits, targets, None if weight is None else weight.to(logits.dtype), reduction="none",
        label_smoothing=objective.label_smoothing,
    )  # fmt: skip
    if objective.z_loss > 0:
        losses = losses + objective.z_loss * logits.logsumexp(1).square()
    if objective.soft is not None:
        temperature = objective.soft_temperature
        q, at, hidden, head_weight, bias = objective.soft.operands(rows)
        log_p = (logits / temperature).log_softmax(1)
        if hidden is not None and head_weight is not None:
            q = (logits_of(hidden, head_weight, bias) / temperature).softmax(1)
        elif at is not None:
            log_p = log_p.gather(1, at)
        assert q is not None
        divergence = (torch.xlogy(q, q) - q * log_p.masked_fill(q == 0, 0)).sum(1)
        losses = losses + objective.soft_weight * temperature**2 * divergence
    return losses


def reduced(transcript: Transcript, losses: Tensor, inverse_divisor: Tensor) -> Tensor:
    """The loss of all steps, with a graph, from their losses [T, B]."""
    weight = transcript.objective.token_weight
    if weight is not None:  # any, also NaN, where there is no loss
        losses = torch.where(transcript.counted(), losses * weight, 0)
    none = transcript.objective.reduction == "none"
    return losses if none else losses.sum() * inverse_divisor


class BeginBackward(torch.autograd.Function):
    """The loss itself, whose backward pass begins here, with checks and the gate of its states.

    The root of the embedding's lookups is an argument, as in `HeadLoss`.
    """

    @staticmethod
    def forward(ctx: Any, saved: SavedForBackward, loss: Tensor, root: Tensor) -> Tensor:
        ctx.saved = saved
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, Tensor | None]:
        check_first_order(OP)
        saved: SavedForBackward = ctx.saved
        saved.check_unchanged()
        saved.model.table.discard_gradients()
        saved.transcript.gate.begin_backward(upstream)
        needs_root = ctx.needs_input_grad[2]
        return None, upstream, saved.model.table.weight.new_zeros(0) if needs_root else None
