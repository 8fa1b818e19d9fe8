"""Recurrent states that a loop detaches between two backward passes, which truncates gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from accumext.auditing._torch_private import RECURRENT, VF, StorageWeakRef, tree_leaves


class States:
    """Tells whether a forward pass began at a state that an earlier one computed with a gradient,
    and that arrived without one. It sees what torch's recurrent modules call."""

    def __init__(self, watching: Callable[[], bool]) -> None:
        self._watching = watching
        self._computed: dict[int, StorageWeakRef] = {}  # by the address of the storage
        self._detached = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in RECURRENT:  # not the modules: decode_loss looks whether these are torch's
                stack.enter_context(self._watched(name))
            yield

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        original, before = getattr(VF, name), vars(VF).get(name)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            # In what is compiled nothing is looked at: it would be compiled otherwise.
            if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self._watching():
                self._see(args[1], result)  # their second argument is the state
            return result

        vars(VF)[name] = function
        try:
            yield
        finally:
            if vars(VF).get(name) is function:  # else somebody has patched it since
                vars(VF).pop(name)
                if before is not None:
                    vars(VF)[name] = before

    def _see(self, given: Any, result: Any) -> None:
        for tensor in _tensors(given):
            before = self._computed.get(tensor.untyped_storage().data_ptr())
            self._detached |= not (tensor.requires_grad or before is None or before.expired())
        for tensor in _tensors(result):
            if tensor.requires_grad:
                storage = tensor.untyped_storage()
                self._computed[storage.data_ptr()] = StorageWeakRef(storage)

    def end(self) -> bool:
        """Tell, when a backward pass begins, whether a state of its steps was detached."""
        detached, self._detached = self._detached, False
        self._computed = {k: v for k, v in self._computed.items() if not v.expired()}
        return detached


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if type(leaf) is Tensor]
