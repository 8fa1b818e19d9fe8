"""Gradients that the product which makes them adds to main gradients itself.

An optimizer with `accumulate_in_backward` marks its parameters. A decoder's forward pass then
leaves the gradient of a marked weight to the backward pass, at the price of forming the logits
again; and while the optimizer runs that pass, the decoder finds the main gradient here, and no
gradient of the weight's size is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from accumext._scalars import Scalar

_MARK = "_accumext_straight"  # attribute of a parameter


class Destination(NamedTuple):
    """`main += gradient * factor` takes a gradient in."""

    main: Tensor
    factor: Scalar


_open: list[Callable[[Tensor], Destination | None]] = []


def mark(parameters: Iterable[Tensor]) -> None:
    """Expect an optimizer to offer these parameters' main gradients."""
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def expected(parameter: Tensor) -> bool:
    """Whether an optimizer will; hooks of the user's on the gradient must see it, though."""
    return _marked(parameter) and not parameter._post_accumulate_grad_hooks


def _marked(parameter: Tensor) -> bool:
    return parameter.is_leaf and hasattr(parameter, _MARK) and not parameter._backward_hooks


@contextmanager
def offering(destination: Callable[[Tensor], Destination | None]) -> Iterator[None]:
    """A context for an optimizer's backward pass, which offers `expected` parameters alone: it may
    have put hooks of its own on them by now."""
    _open.append(destination)
    try:
        yield
    finally:
        _open.remove(destination)


def destination(parameter: Tensor, dtype: torch.dtype) -> Destination | None:
    """Where a gradient of this dtype may be added; None: to be returned to autograd."""
    if not _marked(parameter):
        return None
    for offer in _open:
        found = offer(parameter)
        if found is not None and found.main.dtype == dtype and found.main.is_contiguous():
            return found
    return None
