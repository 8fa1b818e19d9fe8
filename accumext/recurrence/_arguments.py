"""Arguments that several functions of accumext take, checked in the name of the function."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from accumext.tensors.checks import (
    fail_type,
    fail_value,
    integer,
    lengths_tensor,
    token_tensor,
    type_name,
)


def batch_dim_of(op: str, value: Any) -> int:
    """Return the dimension of the batch in the tensors of a state; 0 if it is None."""
    return 0 if value is None else integer(op, "batch_dim", value, 0)


def context_of(op: str, value: Any) -> tuple[Tensor, ...]:
    """Return the tensors that every step reads."""
    if not isinstance(value, (tuple, list)):
        fail_type(op, "context", "be a tuple of tensors", type_name(value))
    for index, tensor in enumerate(value):
        if not isinstance(tensor, Tensor):
            fail_type(op, f"context[{index}]", "be a tensor", type_name(tensor))
    return tuple(value)


def lengths_of(
    op: str, value: Any, shape: tuple[int, int], device: torch.device, whose: str
) -> Tensor:
    """Return the lengths of the rows, int64 [B] in [0, T]. `whose` names the device in an error."""
    steps, batch = shape
    lengths = lengths_tensor(op, "lengths", value, device)
    if list(lengths.shape) != [batch]:
        fail_value(op, "lengths", f"have shape {[batch]}", list(lengths.shape))
    if lengths.device != device:
        fail_value(op, "lengths", f"be on {whose}, {device}", lengths.device)
    if lengths.device.type == "cpu" and ((lengths < 0) | (lengths > steps)).any():
        fail_value(op, "lengths", f"be in [0, {steps}]", lengths.tolist())
    return lengths


def within_length_of(
    op: str, value: Any, shape: tuple[int, int], device: torch.device, whose: str
) -> Tensor:
    """Return which steps are within the lengths of their rows, bool [T, B]."""
    lengths = lengths_of(op, value, shape, device, whose)
    return torch.lt(torch.arange(shape[0], device=device)[:, None], lengths)


def feedback_word(op: str, value: Any, words: tuple[str, ...], contract: str, advice: Any) -> None:
    """Raise unless the feedback is one of the words that a call like this one may have."""
    if not isinstance(value, str) or value not in words:
        got = repr(value) if isinstance(value, str) else type_name(value)
        fail_value(op, "feedback", contract, got, advice)


def start_of(
    op: str, value: Any, batch: int, rows: int | None, device: torch.device, whose: str
) -> Tensor:
    """Return the first input tokens, int64 [B], in [0, rows)."""
    contract = "be an int or an integer tensor [B]"
    if isinstance(value, Tensor):
        start = token_tensor(op, "start", value, contract)
        if start.dim() > 1 or (start.dim() == 1 and len(start) != batch):
            fail_value(op, "start", f"have shape {[batch]}", list(start.shape))
        check_tokens(op, "start", start, rows, device, whose)
        return start.expand(batch)
    if isinstance(value, bool) or not isinstance(value, (int, SupportsIndex)):
        fail_type(op, "start", contract, type_name(value))
    if (token := operator.index(value)) < 0 or (rows is not None and token >= rows):
        fail_value(op, "start", "be at least 0" if rows is None else f"be in [0, {rows})", token)
    return torch.full((batch,), token, device=device)


def check_tokens(
    op: str, name: str, tokens: Tensor, rows: int | None, device: torch.device, whose: str
) -> None:
    """Raise unless tokens are on the device and, if their number is known, have embeddings."""
    if tokens.device != device:
        fail_value(op, name, f"be on {whose}, {device}", tokens.device)
    if rows is not None and (wrong := first_outside(tokens, rows)) is not None:
        fail_value(op, name, f"be in [0, {rows})", wrong)


def first_outside(tokens: Tensor, size: int) -> int | None:
    """Return the first token outside [0, size), if there is one. None on a GPU, whose lookups
    assert their tokens."""
    if tokens.device.type != "cpu" or tokens.numel() == 0:
        return None
    low, high = tokens.aminmax()
    if int(low) >= 0 and int(high) < size:
        return None
    return int(tokens[(tokens < 0) | (tokens >= size)][0])
