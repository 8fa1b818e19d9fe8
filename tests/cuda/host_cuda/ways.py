"""Calls of operators in several orders of threads, on several devices: these must not change a bit
of what they leave."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from host_cuda import ARCH, ASCENDING, DESCENDING, SHUFFLED, loaded
from host_cuda.loaded import device

Runs = tuple[tuple[int, int], ...]  # orders of threads and devices


def usual(*runs: tuple[int, int]) -> Runs:
    """The runs of a call, in checks that are not of the order: of nvcc's kernels the last alone."""
    return runs if ARCH is None else runs[-1:]


# A device holds four blocks on each of its multiprocessors: more of them, as many and fewer than
# most calls have chunks for.
RUNS = usual(
    (ASCENDING, device(1)), (DESCENDING, device(2)), (DESCENDING, device(20)), (SHUFFLED, device(1))
)
ONE_RUN = RUNS[-1:]


def call(op: Callable[..., Any], *arguments: object, runs: Runs = RUNS, **options: object) -> Any:
    """Call an operator in each way, every time on the values that its tensors have now."""
    leaves = (leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor))
    storages = {s.data_ptr(): s for s in (leaf.untyped_storage() for leaf in leaves)}
    memory = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
    before = [m.clone() for m in memory]
    first: list[Tensor] = []
    for order, number in runs:
        for m, bytes_before in zip(memory, before, strict=True):
            m.copy_(bytes_before)
        loaded.set_order(order)
        loaded.use_device(number)
        result = op(*arguments, **options)
        left = [*(m.clone() for m in memory), *_bits(result)]
        first = first or left
        same = all(torch.equal(*pair) for pair in zip(first, left, strict=True))
        assert same, f"run {(order, number)} leaves different bits"
    return result


def _bits(result: object) -> list[Tensor]:
    return [] if result is None else [torch.as_tensor(result).reshape(1).view(torch.uint8)]


def in_every_way(op: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of this operator."""
    return functools.partial(call, op)
