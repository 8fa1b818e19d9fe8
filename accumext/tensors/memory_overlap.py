"""Elements that share memory: of one strided tensor, and of two (csrc/common/overlap.h).

The answers are exact for views that indexing, slicing, transposing and the like make of contiguous
tensors. For other strides, as `as_strided` makes them, and for views of every nth column of a
matrix whose number of columns n does not divide, they may be yes although no element is shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import add, attrgetter, le

import torch
from torch import Tensor

_bytes_of = attrgetter("nbytes")


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two elements may share an address.

    They do not if, ordered by stride, each stride exceeds the span of all smaller dimensions.
    """
    if tensor.is_contiguous() or tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether any byte may belong to an element of both; neither tensor is empty.

    Divide the dimensions of each tensor into inner and outer ones. The inner ones span a block. The
    outer ones of both tensors move blocks by multiples of the greatest common divisor of their
    strides. If blocks do not meet at any such multiple, the tensors share nothing. Any division
    that shows this suffices.
    """
    if b.data_ptr() < a.data_ptr():
        a, b = b, a
    distance = b.data_ptr() - a.data_ptr()
    blocks = [_extent(a), _extent(b)]
    if distance >= blocks[0]:
        return False
    outward = [
        (stride * tensor.element_size(), size, which)
        for which, tensor in enumerate((a, b))
        for stride, size in zip(tensor.stride(), tensor.shape)
        if stride > 0 and size > 1
    ]
    period = 0
    for stride, size, which in sorted(outward, reverse=True):
        period = math.gcd(period, stride)
        blocks[which] -= stride * (size - 1)
        if blocks[0] <= distance % period <= period - blocks[1]:
            return False
    return True


def is_same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one shape are the same elements in the same order."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape) if size > 1)
    )


def any_shared(tensors: Sequence[Tensor]) -> bool:
    """Tell whether any byte may belong to two elements, of one tensor or of two."""
    if _lie_apart(tensors):
        return False
    if any(map(overlaps_itself, tensors)):
        return True
    return next(sharing_pairs(tensors, [True] * len(tensors)), None) is not None


def _lie_apart(tensors: Sequence[Tensor]) -> bool:
    """Tell, without a Python loop, whether all are contiguous and each ends before the next."""
    if not tensors or not all(map(Tensor.is_contiguous, tensors)):
        return not tensors
    try:
        starts = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # a tensor without an address
        return False
    begins, ends = zip(*sorted(zip(starts, map(add, starts, map(_bytes_of, tensors)), strict=True)))
    return all(map(le, ends, islice(begins, 1, None)))


def sharing_pairs(tensors: Sequence[Tensor], written: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the indices of every two tensors that may share memory and of which one is written."""
    ranges = sorted(
        (begin, begin + _extent(tensor), i)
        for i, tensor in enumerate(tensors)
        if tensor.numel() > 0 and (begin := _address(tensor)) > 0
    )
    open_ranges: list[tuple[int, int]] = []  # end, index: those that may reach the next one
    for begin, end, i in ranges:
        open_ranges = [other for other in open_ranges if other[0] > begin]
        for _, j in open_ranges:
            if (written[i] or written[j]) and share_memory(tensors[i], tensors[j]):
                yield min(i, j), max(i, j)
        open_ranges.append((end, i))


def _address(tensor: Tensor) -> int:
    """Return the address of the first element; 0 for tensors without memory or an address."""
    if tensor.layout != torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first element to the end of the last."""
    dims = zip(tensor.stride(), tensor.shape)
    return (sum(stride * (size - 1) for stride, size in dims) + 1) * tensor.element_size()
