"""The loss of each token, and what the losses of a call are divided by."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from accumext.decoder._model import OP, Arguments
from accumext.decoder._tokens import Tokens
from accumext.tensors.checks import (
    FLOAT_DTYPES,
    TOKEN_REDUCTIONS,
    check_vector,
    fail_type,
    fail_value,
    number,
    one_of,
    same_device,
    type_name,
    without_effect,
)
from accumext.tensors.scalars import as_tensor

_SOFT = (
    "be a pair (probabilities [T, B, K], indices [T, B, K] or None) or the head of a teacher, "
    "(weight [V, H'], bias [V] or None, hidden [T, B, H'])"
)


@dataclass(frozen=True)
class SoftTargets:
    """The distributions of a teacher: probabilities of some tokens, or a head with its inputs."""

    probabilities: Tensor | None = None  # [T B, K]
    indices: Tensor | None = None  # int64 [T B, K]; None: all words
    hidden: Tensor | None = None  # [T B, H']
    weight: Tensor | None = None  # [V, H']
    bias: Tensor | None = None  # [V]

    @property
    def of_all_words(self) -> bool:
        """True if there is a probability of every word."""
        return self.probabilities is not None and self.indices is None

    def operands(self, rows: Tensor) -> tuple[Tensor | None, ...]:
        """Return the arguments of `head_objective` for these rows, positions among all T B."""
        if self.hidden is not None:
            return None, None, self.hidden[rows], self.weight, self.bias
        assert self.probabilities is not None
        if self.indices is not None:
            return self.probabilities[rows], self.indices[rows], None, None, None
        words = torch.arange(self.probabilities.shape[1], device=rows.device)
        return self.probabilities[rows], words.expand(len(rows), -1), None, None, None


NO_TEACHER: tuple[Tensor | None, ...] = (None,) * 5


@dataclass(frozen=True)
class Objective:
    """The loss of a token: cross-entropy and terms of whole distributions; and its reduction."""

    label_smoothing: float
    z_loss: float
    class_weight: Tensor | None  # [V]
    reduction: str  # a TokenReduction
    num_items: float | Tensor | None  # divisor of "mean"; None: the sum of counted class weights
    token_weight: Tensor | None  # [T, B], in the accumulation dtype
    # 1 / divisor of the loss, 0-dim. None if it depends on predictions, with eos or class weights
    # of predicted targets. It is then known after the last step, and multiplies gradients later.
    known_inverse_divisor: Tensor | None
    soft: SoftTargets | None = None
    soft_weight: float = 0.0  # of the KL divergence; the cross-entropy has 1 minus this
    soft_temperature: float = 1.0
    entropy_weight: float = 0.0
    of_distributions: bool = False  # needs every logit, not just a logsumexp and a target's logit

    def inverse_divisor(self, counted: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1 / the divisor of the summed losses, once all tokens are known."""
        return inverse_divisor(
            self.reduction, self.num_items, self.class_weight, counted, targets, dtype
        )


def objective_from(tokens: Tokens, head_weight: Tensor, args: Arguments) -> Objective:
    """Check the arguments of the loss and its reduction, and return them."""
    reduction, num_items, class_weight = args["reduction"], None, None
    if args["num_items"] is not None:
        num_items = _num_items(args["num_items"], reduction)
    if reduction.__class__ is not str or reduction not in TOKEN_REDUCTIONS:
        one_of(OP, "reduction", reduction, TOKEN_REDUCTIONS)
    smoothing, z_loss = args["label_smoothing"], args["z_loss"]
    if smoothing.__class__ is not float or smoothing != 0:
        smoothing = number(OP, "label_smoothing", smoothing, 0, 1)
    if z_loss.__class__ is not float or z_loss != 0:
        z_loss = number(OP, "z_loss", z_loss, 0)
    if args["class_weight"] is not None:
        class_weight = _class_weight(args["class_weight"], head_weight)
    token_weight, counted, targets = None, tokens.counted, tokens.targets
    if args["token_weight"] is not None:
        token_weight = _token_weight(args["token_weight"], counted.shape, head_weight)
    inverse = None
    if tokens.eos is None and not (targets is None and class_weight is not None):
        dtype = torch.promote_types(head_weight.dtype, torch.float32)
        inverse = inverse_divisor(reduction, num_items, class_weight, counted, targets, dtype)
    entropy_weight = args["entropy_weight"]
    if entropy_weight.__class__ is not float or entropy_weight != 0:
        entropy_weight = number(OP, "entropy_weight", entropy_weight)
    soft, soft_weight, soft_temperature = None, args["soft_weight"], args["soft_temperature"]
    if args["soft_targets"] is not None:
        soft = _soft_targets(args["soft_targets"], counted, head_weight)
        soft_weight = number(OP, "soft_weight", soft_weight, 0, 1)
        if not 0 < number(OP, "soft_temperature", soft_temperature) < math.inf:
            contract = "be greater than 0 and finite"
            fail_value(OP, "soft_temperature", contract, soft_temperature)
    elif soft_weight != 1 or soft_temperature != 1:
        others = "soft_targets are given"
        without_effect(OP, "soft_weight", soft_weight, (1.0,), others)
        without_effect(OP, "soft_temperature", soft_temperature, (1.0,), others)
    return Objective(
        smoothing, z_loss, class_weight, reduction, num_items, token_weight, inverse, soft,
        0.0 if soft is None else soft_weight, float(soft_temperature), entropy_weight,
        soft is not None or entropy_weight != 0,
    )  # fmt: skip


def inverse_divisor(
    reduction: str, num_items: float | Tensor | None, class_weight: Tensor | None, counted: Tensor,
    targets: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return 1 / the divisor of the summed losses; 0 if no token counts, so that it is not NaN."""
    if reduction != "mean":
        return counted.new_ones((), dtype=dtype)
    if num_items is not None:
        divisor = as_tensor(num_items, dtype, counted.device)
    elif class_weight is not None:
        divisor = torch.where(counted, class_weight.to(dtype)[targets], 0).sum()
    else:
        divisor = counted.sum().to(dtype)
    return torch.where(divisor == 0, 0, divisor.reciprocal())


def _soft_targets(given: Any, counted: Tensor, head_weight: Tensor) -> SoftTargets:
    """Check the argument `soft_targets`, and return it. Rows of tokens that are not counted become
    zeros on a GPU; on a CPU, where they are never read, they stay."""
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        fail_type(OP, "soft_targets", _SOFT, type_name(given))
    words, dtype = len(head_weight), torch.promote_types(head_weight.dtype, torch.float32)
    if len(given) == 2:
        probabilities, indices = given
        probabilities = _per_token(0, probabilities, FLOAT_DTYPES, counted, head_weight, dtype)
        size = probabilities.shape[1]
        if indices is None:
            if size != words:
                contract = f"have all {words} words if no indices are given"
                fail_value(OP, "soft_targets[0]", contract, f"{size} of them")
        else:
            indices = _per_token(1, indices, (torch.int64,), counted, head_weight, torch.int64)
            if indices.shape != probabilities.shape:
                shape = [*counted.shape, size]
                fail_value(OP, "soft_targets[1]", f"have shape {shape}", list(given[1].shape))
        if counted.device.type == "cpu":
            _check_soft_values(probabilities, indices, counted.flatten(), words)
        return SoftTargets(probabilities, indices)
    weight, bias, hidden = given
    if not isinstance(weight, Tensor) or weight.dtype not in FLOAT_DTYPES:
        contract = "be a floating-point tensor [V, H']"
        fail_type(OP, "soft_targets[0]", contract, type_name(weight))
    if weight.dim() != 2 or len(weight) != words:
        fail_value(OP, "soft_targets[0]", f"have shape [{words}, H']", list(weight.shape))
    same_device(OP, "soft_targets[0]", [weight], head_weight.device)
    if bias is not None:
        contract = "be a floating-point tensor [V] or None"
        check_vector(OP, "soft_targets[1]", bias, FLOAT_DTYPES, contract, words, head_weight.device)
    hidden = _per_token(2, hidden, FLOAT_DTYPES, counted, head_weight, dtype)
    if hidden.shape[1] != weight.shape[1]:
        contract = f"have the teacher's size, {weight.shape[1]}"
        fail_value(OP, "soft_targets[2]", contract, list(given[2].shape))
    weight = weight.detach()
    if (weight.dtype == torch.float64) != (dtype == torch.float64):
        weight = weight.to(dtype)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    bias = None if bias is None else bias.detach().to(dtype).contiguous()
    return SoftTargets(hidden=hidden, weight=weight, bias=bias)


def _per_token(
    place: int, value: Any, dtypes: tuple[torch.dtype, ...], counted: Tensor,
    head_weight: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Check an entry of `soft_targets`, [T, B, K] with any K, and return it as [T B, K]."""
    name, kind = f"soft_targets[{place}]", "an integer" if dtype == torch.int64 else "a float"
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        fail_type(OP, name, f"be {kind} tensor [T, B, K]", type_name(value))
    if value.dim() != 3 or value.shape[:2] != counted.shape:
        contract = f"have shape [{counted.shape[0]}, {counted.shape[1]}, K]"
        fail_value(OP, name, contract, list(value.shape))
    same_device(OP, name, [value], head_weight.device)
    value = value.detach().to(dtype)
    if value.device.type != "cpu":
        value = torch.where(counted[:, :, None], value, 0)
    rows: Tensor = value.flatten(0, 1).contiguous()
    return rows


def _check_soft_values(
    probabilities: Tensor, indices: Tensor | None, counted: Tensor, words: int
) -> None:
    """Raise if a counted row has a negative probability or an index outside [0, V)."""
    negative = (probabilities < 0).any(1) & counted
    if negative.any():
        least = float(probabilities[negative].min())
        fail_value(OP, "soft_targets[0]", "be at least 0", least)
    if indices is None:
        return
    wrong = ((indices < 0) | (indices >= words)) & counted[:, None]
    if wrong.any():
        fail_value(OP, "soft_targets[1]", f"be in [0, {words})", int(indices[wrong][0]))


def _class_weight(value: Any, head_weight: Tensor) -> Tensor:
    size, device = len(head_weight), head_weight.device
    contract = "be a floating-point tensor [V] or a list of numbers"
    if isinstance(value, (tuple, list)):
        numbers = [number(OP, f"class_weight[{i}]", weight) for i, weight in enumerate(value)]
        value = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        value = value.to(device, non_blocking=True)
    check_vector(OP, "class_weight", value, FLOAT_DTYPES, contract, size, device)
    weight: Tensor = value.detach().clone()  # the backward pass may read it again
    return weight


def _num_items(value: Any, reduction: Any) -> float | Tensor:
    if reduction != "mean":
        fail_value(OP, "num_items", "be None unless reduction is 'mean'", value)
    if isinstance(value, Tensor):
        if value.dim() != 0:
            fail_value(OP, "num_items", "be a number or a 0-dim tensor", list(value.shape))
        if value.device.type == "cpu" and not bool(value >= 0):
            fail_value(OP, "num_items", "be at least 0", value.item())
        return value
    if isinstance(value, bool) or not isinstance(value, (float, SupportsIndex)):
        fail_type(OP, "num_items", "be a number or a 0-dim tensor", type_name(value))
    count = value if isinstance(value, float) else operator.index(value)
    if not count >= 0:
        fail_value(OP, "num_items", "be at least 0", count)
    return count


def _token_weight(value: Any, shape: torch.Size, weight: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in FLOAT_DTYPES:
        fail_type(OP, "token_weight", "be a floating-point tensor [T, B]", type_name(value))
    if value.shape != shape:
        fail_value(OP, "token_weight", f"have shape {list(shape)}", list(value.shape))
    same_device(OP, "token_weight", [value], weight.device)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return value.detach().to(dtype, copy=True)  # the backward pass may read it again
