"""Memory for `main gradient * factor`, where the wrapped optimizer does not multiply itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accumext._memory_overlap import bytes_of
from accumext._torch_private import storage_users
from accumext.optimizer._window import MainGrads

# The C library gives larger blocks back to the system as soon as they are freed.
_LARGE = 32 << 20  # bytes
_ALIGNMENT = 64  # bytes, as every tensor's memory on a CPU; a multiple of every element's size


class ProductMemory:
    """New memory for `main * factor`; much of it is kept on a CPU from one step to the next.

    There the system hands out fresh pages, which takes several times as long as the product. What
    is kept is one block, and it is used again only if nobody holds a part of it any more.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._block: torch.UntypedStorage | None = None

    def like(self, main_grads: MainGrads) -> list[Tensor]:
        """A tensor to be overwritten for each main gradient, in the dtype of its parameter.

        That of a sparse one is a copy, as its indices are needed.
        """
        tensors = main_grads.tensors
        if not main_grads.one_call or main_grads.casts:
            return [
                main.to(p.dtype, copy=True)
                if main.is_sparse
                else torch.empty_like(main, dtype=p.dtype)
                for p, main in zip(main_grads.parameters, tensors, strict=True)
            ]
        if not (self._keeps and _is_large(tensors)):
            return list(map(torch.empty_like, tensors))
        block = self._block_of(sum(map(_room_for, tensors)))
        products, begin = [], 0
        for main in tensors:
            stride = main.stride() if main.is_contiguous() else _layout_of(main)
            product = torch.empty(0, dtype=main.dtype)
            products.append(product.set_(block, begin // main.element_size(), main.shape, stride))
            begin += _room_for(main)
        return products

    def _block_of(self, size: int) -> torch.UntypedStorage:
        """The kept block, if it is free and of this size, else a new one, which is kept."""
        if self._block is None or self._block.nbytes() != size or _users(self._block) > _ALONE:
            self._block = None  # before there is another
            self._block = torch.UntypedStorage(size)
        return self._block

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": None}


def _is_large(tensors: Sequence[Tensor]) -> bool:
    """Whether to keep as much memory pays."""
    if not tensors or not tensors[0].is_cpu or torch.compiler.is_compiling():
        return False
    total: int = sum(map(bytes_of, tensors))
    return total >= _LARGE


def _room_for(main: Tensor) -> int:
    """Bytes, to where the next tensor may begin."""
    return -(-main.nbytes // _ALIGNMENT) * _ALIGNMENT


def _layout_of(main: Tensor) -> tuple[int, ...]:
    """The strides of its `empty_like`."""
    return torch.empty_like(main, device="meta").stride()


def _users(block: torch.UntypedStorage) -> int:
    """How many tensors use the block, and how many variables refer to the block itself."""
    return storage_users(block) + sys.getrefcount(block)


_probe = [torch.UntypedStorage(0)]
_ALONE = _users(_probe[0])
del _probe
