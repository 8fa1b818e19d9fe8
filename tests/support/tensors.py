"""Tensors of a test: their dtypes, where they lie, and when they are equal."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shifted(tensor: Tensor, shift: int) -> Tensor:
    """The values of a vector in a slice of NaN, `shift` elements past an aligned address."""
    base = tensor.new_full((tensor.numel() + shift + 16,), math.nan)
    return base[shift : shift + tensor.numel()].copy_(tensor)


def assert_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compare values, and how many tensors there are; no NaN is equal to another."""
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(got, want), f"tensor {i} is {got}, not {want}"


def assert_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare bit for bit, but for the payload of a NaN, on whatever devices."""
    for got, want in zip(actual, expected, strict=True):
        got, want = got.cpu(), want.cpu()
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        number = ~want.isnan()
        assert torch.equal(got.signbit()[number], want.signbit()[number])
