"""Losses of whole distributions by their definition: distillation, and an entropy bonus."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOFT = ("soft_tokens", "soft_words", "soft_teacher")


def soft_targets(
    kind: str, steps: int, batch: int, words: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor | None, ...]:
    """The argument of `decode_loss` of one of the kinds: some tokens, all words, a head."""
    if kind == "soft_teacher":
        weight, bias = torch.randn(words, 4, dtype=dtype), torch.randn(words, dtype=dtype)
        return weight, bias, torch.randn(steps, batch, 4, dtype=dtype)
    size = words if kind == "soft_words" else min(3, words)
    probabilities = torch.randn(steps, batch, size, dtype=dtype).softmax(-1)
    probabilities[..., 0] = 0.0  # they need not add up to 1
    if kind == "soft_words":
        return probabilities, None
    return probabilities, torch.randint(words, (steps, batch, size))  # some of them twice


def entropy(z: Tensor) -> Tensor:
    """Of softmax(z), [M]; as TRL's PPO trainer has it."""
    z = z.clamp(min=torch.finfo(z.dtype).min)  # a masked word's part is 0
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


def divergence(
    z: Tensor,  # [M, V]
    soft: tuple[Tensor | None, ...],
    step: int | slice,
    temperature: float,
) -> Tensor:
    """KL(teacher || model), [M], both at a temperature: of a head as TRL's GKD trainer (beta=0) and
    Liger's distillation losses have it."""
    log_p = (z / temperature).log_softmax(-1)
    if len(soft) == 3:
        weight, bias, hidden = soft
        assert weight is not None
        assert hidden is not None
        log_q = (F.linear(hidden[step], weight, bias) / temperature).log_softmax(-1)
        # a word that the teacher never says adds 0 times infinity
        terms = F.kl_div(log_p, log_q, reduction="none", log_target=True)
        return terms.nan_to_num(0.0).sum(-1)
    probabilities, indices = soft
    assert probabilities is not None
    log_p = log_p if indices is None else log_p.gather(-1, indices[step])
    return F.kl_div(log_p, probabilities[step], reduction="none").sum(-1)


def objective(call: dict[str, Any]) -> Any:
    """(step, logits [B, V], cross-entropies [B]) -> losses [B], for these options of a call."""
    soft, bonus = call.get("soft_targets"), call.get("entropy_weight", 0.0)
    weight, temperature = call.get("soft_weight", 1.0), call.get("soft_temperature", 1.0)

    def losses(step: int, z: Tensor, hard: Tensor) -> Tensor:
        if soft is not None:
            distance = temperature**2 * divergence(z, soft, step, temperature)
            hard = (1 - weight) * hard + weight * distance
        return hard - bonus * entropy(z)

    return losses
