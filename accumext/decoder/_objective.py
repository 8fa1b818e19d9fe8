"""The loss of each token, and what the losses of a call are divided by."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from accumext._checks import (
    FLOAT_DTYPES,
    TOKEN_REDUCTIONS,
    check_vector,
    fail_type,
    fail_value,
    number,
    one_of,
    same_device,
    type_name,
)
from accumext._scalars import as_tensor


@dataclass(frozen=True)
class Objective:
    """The loss of a token, as in `F.cross_entropy`, and its reduction."""

    label_smoothing: float
    z_loss: float
    class_weight: Tensor | None  # [V]
    reduction: str  # a TokenReduction
    num_items: float | Tensor | None  # divisor of "mean"; None: the sum of the weights that count
    token_weight: Tensor | None  # [T, B], in the accumulation dtype
    # 1 / divisor of the loss, 0-dim. With eos, or weights of classes that are not known yet, it is
    # known only after the last step, and the gradients that are formed before then lack it.
    known_inverse_divisor: Tensor | None

    @staticmethod
    def of(
        op: str,
        counted: Tensor,  # bool [T, B]
        targets: Tensor | None,  # int64 [T, B]; None: those of the decoder itself
        ends: bool,  # tokens end rows, so that fewer may count
        head_weight: Tensor,  # [V, H]
        *,
        label_smoothing: Any, z_loss: Any, class_weight: Any, reduction: Any, num_items: Any,
        token_weight: Any,
    ) -> Objective:  # fmt: skip
        """The arguments of these names, checked."""
        if num_items is not None:
            num_items = _num_items(op, num_items, reduction)
        if reduction.__class__ is not str or reduction not in TOKEN_REDUCTIONS:
            one_of(op, "reduction", reduction, TOKEN_REDUCTIONS)
        smoothing = label_smoothing
        if smoothing.__class__ is not float or smoothing != 0:
            smoothing = number(op, "label_smoothing", label_smoothing, 0)
            if smoothing > 1:
                fail_value(op, "label_smoothing", "be at most 1", label_smoothing)
        if z_loss.__class__ is not float or z_loss != 0:
            z_loss = number(op, "z_loss", z_loss, 0)
        if class_weight is not None:
            class_weight = _class_weight(op, class_weight, head_weight)
        if token_weight is not None:
            token_weight = _token_weight(op, token_weight, counted.shape, head_weight)
        inverse = None
        if not (ends or (targets is None and class_weight is not None)):
            dtype = torch.promote_types(head_weight.dtype, torch.float32)
            inverse = inverse_divisor(reduction, num_items, class_weight, counted, targets, dtype)
        return Objective(
            smoothing, z_loss, class_weight, reduction, num_items, token_weight, inverse
        )

    def inverse_divisor(self, counted: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """1 / the divisor of the sum, once all tokens are known."""
        return inverse_divisor(
            self.reduction, self.num_items, self.class_weight, counted, targets, dtype
        )


def inverse_divisor(
    reduction: str, num_items: float | Tensor | None, class_weight: Tensor | None, counted: Tensor,
    targets: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """1 / the divisor of the sum; 0 where nothing counts, so that the loss is not NaN."""
    if reduction != "mean":
        return counted.new_ones((), dtype=dtype)
    if num_items is not None:
        divisor = as_tensor(num_items, dtype, counted.device)
    elif class_weight is not None:
        divisor = torch.where(counted, class_weight.to(dtype)[targets], 0).sum()
    else:
        divisor = counted.sum().to(dtype)
    return torch.where(divisor == 0, 0, divisor.reciprocal())


def _class_weight(op: str, value: Any, head_weight: Tensor) -> Tensor:
    size, device = len(head_weight), head_weight.device
    contract = "be a floating-point tensor [V] or a list of numbers"
    if isinstance(value, (tuple, list)):
        numbers = [number(op, f"class_weight[{i}]", weight) for i, weight in enumerate(value)]
        value = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    check_vector(op, "class_weight", value, FLOAT_DTYPES, contract, size, device)
    weight: Tensor = value.detach().clone()  # the pass back may read it again
    return weight


def _num_items(op: str, value: Any, reduction: Any) -> float | Tensor:
    if reduction != "mean":
        fail_value(op, "num_items", "be None unless reduction is 'mean'", value)
    if isinstance(value, Tensor):
        if value.dim() != 0:
            fail_value(op, "num_items", "be a number or a 0-dim tensor", list(value.shape))
        if value.device.type == "cpu" and not bool(value >= 0):
            fail_value(op, "num_items", "be at least 0", value.item())
        return value
    if isinstance(value, bool) or not isinstance(value, (float, SupportsIndex)):
        fail_type(op, "num_items", "be a number or a 0-dim tensor", type_name(value))
    count = value if isinstance(value, float) else operator.index(value)
    if not count >= 0:
        fail_value(op, "num_items", "be at least 0", count)
    return count


def _token_weight(op: str, value: Any, shape: torch.Size, weight: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in FLOAT_DTYPES:
        fail_type(op, "token_weight", "be a floating-point tensor [T, B]", type_name(value))
    if value.shape != shape:
        fail_value(op, "token_weight", f"have shape {list(shape)}", list(value.shape))
    same_device(op, "token_weight", [value], weight.device)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return value.detach().to(dtype, copy=True)  # the pass back may read it again
