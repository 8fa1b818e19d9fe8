"""The main gradients of a window: which tensors they are, and of what kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter

from torch import Tensor

from accumext._gradients import any_dtensor, are_plain

_dtype_of = attrgetter("dtype")


class MainGrads:
    """One tensor per parameter that received a gradient, in the order of the parameters.

    Their values change, but not which tensors they are, so what is asked of them is asked once.
    """

    def __init__(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.tensors = list(tensors)

    @classmethod
    def of(cls, mains: dict[Tensor, Tensor]) -> MainGrads:
        """From main gradients by parameter."""
        grads = cls(list(mains), list(mains.values()))
        grads.by_parameter = mains
        return grads

    @cached_property
    def by_parameter(self) -> dict[Tensor, Tensor]:
        """The main gradient of each parameter that has one."""
        return dict(zip(self.parameters, self.tensors, strict=True))

    @cached_property
    def plain(self) -> bool:
        """Whether one call of an operator takes them all as they are."""
        return are_plain(self.tensors)

    @cached_property
    def sharded(self) -> bool:
        """Whether any is only one process's part."""
        return not self.plain and any_dtensor(self.tensors)

    @cached_property
    def dense(self) -> bool:
        """Whether none is sparse."""
        return self.plain or not any(main.is_sparse for main in self.tensors)

    @cached_property
    def casts(self) -> dict[Tensor, Tensor]:
        """Those of another dtype than their parameter: float32 for one of half precision."""
        if list(map(_dtype_of, self.parameters)) == list(map(_dtype_of, self.tensors)):
            return {}
        pairs = zip(self.parameters, self.tensors, strict=True)
        return {p: main for p, main in pairs if main.dtype != p.dtype}

    def without(self, others: dict[Tensor, Tensor]) -> MainGrads:
        """All but those of some parameters."""
        if not others:
            return self
        return MainGrads.of({p: m for p, m in self.by_parameter.items() if p not in others})

    def lend(self) -> None:
        """Put them into `.grad`."""
        for parameter, main in zip(self.parameters, self.tensors, strict=True):
            parameter.grad = main

    def withdraw(self) -> None:
        """Empty `.grad` of their parameters."""
        for parameter in self.parameters:
            parameter.grad = None
