"""Weight-gradient accumulation fusion: an operator adds to `param.main_grad` instead of returning
a gradient, so that none of the weight's size is ever made.

The convention is that of Megatron-LM and TransformerEngine. An optimizer with
`accumulate_in_backward` gives its parameters the attribute `main_grad`, None for most of the time.
An operator that finds it in the forward pass may leave the weight's gradient to the backward pass
(the decoder forms its logits again for that). In the optimizer's own backward pass
`param.get_main_grad()` returns a tensor, zeros if nothing was added yet, which the operator keeps
as `param.main_grad`. To that it adds `gradient * param.main_grad_factor` (1.0 unless micro-batches
differ in weight or loss scale), sets `param.grad_added_to_main_grad` and returns no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor

from accumext._scalars import Scalar
from accumext._torch_private import gradient_hooks

_OWNER = "_main_grad_owner"


class Destination(NamedTuple):
    """Where a gradient is added: `main_grad += gradient * factor`."""

    main_grad: Tensor
    factor: Scalar


class _Owner:
    """The optimizer behind a `main_grad`, while it lives; unknown to a pickled parameter."""

    def __init__(self, owner: object) -> None:
        self.reference: Callable[[], object] = ref(owner)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()


class MainGradAttributes:
    """The attribute `main_grad` of an optimizer's parameters, while the optimizer lives."""

    def __init__(self) -> None:
        self._owner = _Owner(self)
        self._parameters: list[ReferenceType[Tensor]] = []
        finalize(self, _remove, self._parameters, self._owner)

    def declare(self, parameters: Iterable[Tensor]) -> None:
        """Give these parameters a `main_grad`, None for now."""
        for parameter in parameters:
            if getattr(parameter, _OWNER, None) is not self._owner:
                vars(parameter).update({"main_grad": None, _OWNER: self._owner})
                self._parameters.append(ref(parameter))

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MainGradAttributes.__init__(self)


def _remove(parameters: list[ReferenceType[Tensor]], owner: _Owner) -> None:
    for reference in parameters:
        parameter = reference()
        if parameter is not None and getattr(parameter, _OWNER, None) is owner:
            for name in ("main_grad", "main_grad_factor", "grad_added_to_main_grad", _OWNER):
                vars(parameter).pop(name, None)


def may_fuse(parameter: Tensor) -> bool:
    """Whether an optimizer will offer a `main_grad`, and no hook has to see the gradient."""
    owner = getattr(parameter, _OWNER, None)
    return (
        owner is not None
        and owner.reference() is not None
        and parameter.is_leaf
        and not any(gradient_hooks(parameter))
    )


def destination(parameter: Tensor, dtype: torch.dtype) -> Destination | None:
    """In a backward pass: where to add a gradient of this dtype; None: return it to autograd.

    Whoever gets a destination adds to it.
    """
    get_main_grad = getattr(parameter, "get_main_grad", None)
    main_grad = None if get_main_grad is None else get_main_grad()
    if main_grad is None or main_grad.dtype != dtype or not main_grad.is_contiguous():
        return None
    vars(parameter).update(main_grad=main_grad, grad_added_to_main_grad=True)
    return Destination(main_grad, parameter.main_grad_factor)  # type: ignore[attr-defined]


@contextmanager
def offering(
    parameters: Iterable[Tensor], main_grad_of: Callable[[Tensor], Tensor | None], factor: Scalar
) -> Iterator[None]:
    """A context for an optimizer's backward pass, in which operators may add to main gradients.

    Args:
        parameters: those that `may_fuse` allows are offered.
        main_grad_of: the main gradient of a parameter, made when it is asked for; None: there is
            none, and the gradient takes the usual way.
        factor: of the gradients.
    """
    offered = list(filter(may_fuse, parameters))
    try:
        for parameter in offered:
            get_main_grad = partial(main_grad_of, parameter)
            vars(parameter).update(get_main_grad=get_main_grad, main_grad_factor=factor)
        yield
    finally:
        for parameter in offered:
            vars(parameter).pop("get_main_grad", None)
            vars(parameter).update(main_grad=None)
