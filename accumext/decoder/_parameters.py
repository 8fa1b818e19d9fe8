"""The signature of `decode_memory`: it is derived from that of `decode_loss`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol

from torch import Tensor, nn

P = ParamSpec("P")


class DecodeMemory(Protocol[P]):
    """The type of `decode_memory`: as `decode_loss`, with other targets and another result."""

    def __call__(
        self,
        embedding: nn.Embedding | Tensor | None,
        cell: nn.Module | Callable[..., Any],
        head: nn.Linear | tuple[Tensor, Tensor | None],
        targets: Tensor | tuple[int, int] | None,
        *args: P.args,
        **options: P.kwargs,
    ) -> int: ...


def with_parameters_of(
    function: Callable[Concatenate[Any, Any, Any, Any, P], Any],
) -> Callable[[Callable[[dict[str, Any]], int]], DecodeMemory[P]]:
    """Give the decorated function the parameters of `function`. It gets them in one dict."""
    parameters = dict(inspect.signature(function).parameters)
    targets = "Tensor | tuple[int, int] | None"
    parameters["targets"] = parameters["targets"].replace(annotation=targets)
    signature = inspect.Signature([*parameters.values()], return_annotation="int")

    def decorate(predict: Callable[[dict[str, Any]], int]) -> DecodeMemory[P]:
        @functools.wraps(predict)
        def call(*args: Any, **options: Any) -> int:
            try:
                bound = signature.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{predict.__name__}() {error}") from None
            bound.apply_defaults()
            return predict(bound.arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
