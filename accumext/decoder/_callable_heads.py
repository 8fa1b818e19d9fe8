"""The head behind the steps of a callable cell.

It is computed from its weights for many steps at once. A head that does more is called at every
step and in replays; autograd then differentiates the losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accumext.decoder import _operators
from accumext.decoder._fused_cross_entropy import FusedCrossEntropy, NeedsGrad
from accumext.decoder._model import OP, Model
from accumext.decoder._objective import Objective
from accumext.decoder._precision import no_autocast, no_grad_no_autocast
from accumext.decoder._transcript import Transcript
from accumext.recurrence import sample
from accumext.tensors.checks import fail_type, fail_value, type_name


def fused_head(transcript: Transcript, differentiable: bool) -> FusedCrossEntropy:
    """Return the head, which forms its gradients in the forward pass if the plan says so."""
    model, plan, size = transcript.model, transcript.plan, transcript.losses.numel()
    needs = None
    if torch.is_grad_enabled() and plan.gradients_in_forward:
        bias_grad = model.head_bias is not None and model.head_bias.requires_grad
        needs = NeedsGrad(differentiable, model.head_weight.requires_grad, bias_grad)
    with no_grad_no_autocast(transcript.losses.device):
        return FusedCrossEntropy(model, transcript.objective, plan, size, needs)


class HeadOfSteps:
    """Computes the head from the outputs of the cell, in the order of the steps.

    A token that the next step waits for is predicted at once. Losses and gradients are formed for
    as many steps together as the workspace holds.
    """

    def __init__(self, transcript: Transcript, head: FusedCrossEntropy) -> None:
        tokens, batch = transcript.tokens, transcript.tokens.batch
        self._transcript, self._head = transcript, head
        # If rows end, `Transcript.predict` passes only the active rows of each step on to the head.
        by_steps = transcript.active is None and head.rows >= batch
        self._finds_tokens = tokens.free_running and by_steps
        self._size = head.rows // batch if by_steps or not tokens.free_running else 1  # steps
        self._begin = 0  # the first step whose losses are not formed yet
        self._hidden: list[Tensor] = []  # outputs of the steps from `_begin` on, [n B, H] each
        self._stats: list[Tensor] = []  # [3, B] of each of them, if tokens are predicted at once
        self._exps: tuple[Tensor, ...] | None = None  # space for exponentials, [B, V] per step
        self._precision = no_autocast(transcript.losses.device)

    def add(self, begin: int, end: int, hidden: Tensor) -> None:
        """Take the outputs [(end - begin) B, H] of steps: of one step, if the next waits for it."""
        hidden = hidden.detach()
        if self._finds_tokens:
            # A copy: the cell may write into its output at the next step.
            hidden = hidden.to(self._head.dtype, copy=True).contiguous()
            with self._precision:
                self._find_tokens(begin, hidden)
        self._hidden.append(hidden)
        if end - self._begin >= self._size or end == self._transcript.tokens.steps:
            self.finish(end)

    def _find_tokens(self, step: int, hidden: Tensor) -> None:
        transcript, head, at = self._transcript, self._head, step - self._begin
        tokens, targets = transcript.tokens, transcript.tokens.targets
        uniforms = transcript.source.uniforms
        if at == 0:
            steps = min(self._size, tokens.steps - step)
            exps = None
            if not head.of_distributions:
                exps = head.workspace_slice(steps * tokens.batch)
            self._exps = None if exps is None else exps.split(tokens.batch)
        self._stats.append(hidden.new_empty(3, tokens.batch))
        _operators.head_forward(
            hidden, head.weight, head.bias, None if targets is None else targets[step],
            None if uniforms is None else uniforms[step], transcript.source.temperature,
            None if self._exps is None else self._exps[at], head.logit_rows,
            transcript.predicted[step], self._stats[-1],
        )  # fmt: skip

    def finish(self, end: int) -> None:
        """Form the losses, gradients and missing tokens of all steps before `end`."""
        begin, batch, given = self._begin, self._transcript.tokens.batch, self._hidden
        self._begin, self._hidden = end, []
        if not given:
            return
        hidden = given[0] if len(given) == 1 else torch.cat(given)
        with no_grad_no_autocast(hidden.device):
            if not self._finds_tokens:
                self._transcript.predict(self._head, begin, end, hidden)
                return
            rows = torch.arange(begin * batch, end * batch, device=hidden.device)
            stats, self._stats = torch.cat(self._stats, 1), []
            self._transcript.add_rows(self._head, rows, hidden, stats)


def called_logits(op: str, model: Model, hidden: Tensor) -> Tensor:
    """Return the logits [M, V] of a head that is called, in the accumulation dtype."""
    assert model.called_head is not None
    logits: Any = model.called_head(hidden)
    if not isinstance(logits, Tensor):
        fail_type(op, "head", "return a tensor of logits", type_name(logits))
    shape = [len(hidden), len(model.head_weight)]
    if list(logits.shape) != shape:
        fail_value(op, "head", f"return logits of shape {shape}", list(logits.shape))
    return logits.to(model.dtypes.accumulation)


def called_head_losses(transcript: Transcript, step: int, hidden: Tensor, known: bool) -> Tensor:
    """Return the losses [B] of a step, with a graph, from the head's input [B, H]. Predict the
    token of the step if it is not known yet."""
    objective, source = transcript.objective, transcript.source
    logits = called_logits(OP, transcript.model, hidden)
    with no_autocast(logits.device):
        if not known:
            detached = logits.detach()
            tokens = detached.max(1).indices
            if source.uniforms is not None:
                tokens = sample(detached, source.uniforms[step], source.temperature)
            transcript.predicted[step] = transcript.padded(step, tokens)
        batch = len(hidden)
        rows = torch.arange(step * batch, (step + 1) * batch, device=hidden.device)
        # A copy: the graph keeps it, and predictions as targets are written at later steps.
        targets = transcript.targets[step].clone()
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
    """Return the entropies of softmax(logits) [M, V]; a logit of -inf gets no gradient."""
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0)).sum(1)


def losses_of_logits(objective: Objective, logits: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """Return the losses of logits [M, V] by their definition, without the entropy term; `rows` are
    their positions among all T B rows."""
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
            q = (_operators.logits_of(hidden, head_weight, bias) / temperature).softmax(1)
        elif at is not None:
            log_p = log_p.gather(1, at)
        assert q is not None
        divergence = (torch.xlogy(q, q) - q * log_p.masked_fill(q == 0, 0)).sum(1)
        losses = losses + objective.soft_weight * temperature**2 * divergence
    return losses


def reduced(transcript: Transcript, losses: Tensor, inverse_divisor: Tensor) -> Tensor:
    """Return the reduced loss, with a graph, from the losses [T, B] of all steps."""
    weight = transcript.objective.token_weight
    if weight is not None:  # the weight of a token that is not counted may be NaN
        losses = torch.where(transcript.counted(), losses * weight, 0)
    none = transcript.objective.reduction == "none"
    return losses if none else losses.sum() * inverse_divisor
