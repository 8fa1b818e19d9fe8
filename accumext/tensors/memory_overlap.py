"""Elements that share memory: of one strided tensor, and of two (csrc/common/overlap.h).

Answers are exact but where the search for a common address is given up, and then they say yes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import add, attrgetter, le
from typing import NamedTuple

import torch
from torch import Tensor

bytes_of = attrgetter("nbytes")
_MOST_TRIES = 1 << 14  # values that one search may try; strides of real tensors need a handful


class _Term(NamedTuple):
    """The move of an address: `stride` > 0, as many times as [low, high] has integers."""

    stride: int
    low: int
    high: int


class _Rest(NamedTuple):
    """The properties of sums of the terms from one on."""

    least: int
    most: int
    divisor: int  # of every sum


def _reach(terms: Sequence[_Term], target: int) -> bool:
    """Tell whether one multiple of every stride sum up to `target`: depth first, largest first."""
    terms = sorted(terms, reverse=True)
    rests = [_Rest(0, 0, 0)]
    for stride, low, high in reversed(terms):
        after = rests[-1]
        rests.append(
            _Rest(
                after.least + stride * low,
                after.most + stride * high,
                math.gcd(after.divisor, stride),
            )
        )
    rests.reverse()
    tries = 0

    def search(k: int, target: int) -> bool:
        nonlocal tries
        rest = rests[k]
        if not rest.least <= target <= rest.most:
            return False
        if k == len(terms):
            return True
        if target % rest.divisor != 0:
            return False
        (stride, low, high), after = terms[k], rests[k + 1]
        low = max(low, -((after.most - target) // stride))
        high = min(high, (target - after.least) // stride)
        # Only every `step`th value leaves a multiple of what divides all later sums.
        step = after.divisor // rest.divisor or 1
        first = target // rest.divisor * pow(stride // rest.divisor, -1, step)
        for x in range(low + (first - low) % step, high + 1, step):
            tries += 1
            if tries > _MOST_TRIES or search(k + 1, target - x * stride):
                return True
        return False

    return search(0, target)


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two elements share an address.

    Mostly, ordered by stride, a dimension steps over everything that the smaller ones reach; where
    not, some difference of indices has to be 0.
    """
    if tensor.is_contiguous() or tensor.numel() == 0:
        return False
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    ordered = sorted((stride, size) for stride, size in dims if size > 1)
    reach, nested = 0, True
    for stride, size in ordered:
        if stride == 0:
            return True
        nested = nested and stride > reach
        reach += stride * (size - 1)
    if nested:
        return False
    smaller: list[_Term] = []
    for stride, size in ordered:  # the largest of those in which the indices differ
        if _reach([*smaller, _Term(stride, 1, size - 1)], 0):
            return True
        smaller.append(_Term(stride, 1 - size, size - 1))
    return False


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether any byte belongs to an element of both."""
    distance = b.data_ptr() - a.data_ptr()
    unit = min(a.element_size(), b.element_size())  # bytes; powers of 2, so it divides both
    if distance % unit != 0:
        unit = 1
    size_a, size_b = a.element_size() // unit, b.element_size() // unit
    moves = [(stride * size_a, 0, size - 1) for stride, size in zip(a.stride(), a.shape)]
    moves += [(stride * size_b, 1 - size, 0) for stride, size in zip(b.stride(), b.shape)]
    moves.append((1, 1 - size_b, size_a - 1))
    terms: dict[int, _Term] = {}
    for stride, low, high in moves:
        if stride > 0 and low < high:
            known = terms.get(stride, _Term(stride, 0, 0))
            terms[stride] = _Term(stride, known.low + low, known.high + high)
    return _reach(list(terms.values()), distance // unit)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one shape are the same elements in the same order."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape) if size > 1)
    )


def any_shared(tensors: Sequence[Tensor]) -> bool:
    """Tell whether any byte belongs to two elements, of one tensor or of two."""
    if _lie_apart(tensors):
        return False
    if any(map(overlaps_itself, tensors)):
        return True
    return next(sharing_pairs(tensors, [True] * len(tensors)), None) is not None


def _lie_apart(tensors: Sequence[Tensor]) -> bool:
    """Tell whether all are contiguous and each ends before the next begins; no loop in Python."""
    if not tensors or not all(map(Tensor.is_contiguous, tensors)):
        return not tensors
    try:
        starts = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # one that does not show its memory
        return False
    begins, ends = zip(*sorted(zip(starts, map(add, starts, map(bytes_of, tensors)), strict=True)))
    return all(map(le, ends, islice(begins, 1, None)))


def sharing_pairs(tensors: Sequence[Tensor], written: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Indices of every two tensors that share memory and of which one is written."""
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
    """The address of the first element; 0 for tensors that have no memory, or do not show it."""
    if tensor.layout != torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    dims = zip(tensor.stride(), tensor.shape)
    return (sum(stride * (size - 1) for stride, size in dims) + 1) * tensor.element_size()
