"""Weight-gradient accumulation fusion: an operator adds to an optimizer's sum of gradients instead
of returning a gradient, so that no second tensor of the weight's size is allocated.

As `main_grad` in Megatron-LM and TransformerEngine, but the sums stay with the optimizer: its
parameters know its `MainGrads`. If `may_fuse` says in the forward pass that there will be a sum, an
operator may compute the weight's gradient in the backward pass (for which the decoder recomputes
its logits). In the optimizer's own backward pass `destination` returns the sum. The operator adds
to it, and returns no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor

from accumext.tensors.torch_private import gradient_hooks

_OWNER = "_main_grad_owner"
# Called by `destination` with a parameter and its sum, before an operator adds to that: an audit.
observers: list[Callable[[Tensor, Tensor], None]] = []


class Holder(Protocol):
    """What `MainGrads` needs of an optimizer."""

    def expects_sum(self, parameter: Tensor) -> bool:
        """Tell whether the next backward pass adds to an existing sum of this parameter."""

    def nothing_to_clip(self) -> None:
        """Warn that `clip_grad_norm_` has found no gradient of its parameters."""


class _Owner:
    """A weak reference to the main gradients of an optimizer; None in a pickled parameter."""

    def __init__(self, main_grads: MainGrads) -> None:
        self.reference: Callable[[], MainGrads | None] = ref(main_grads)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()


class MainGrads:
    """The sums that an optimizer offers to operators that use its parameters."""

    def __init__(self, holder: Holder, parameters: Iterable[Tensor]) -> None:
        self.holder = ref(holder)
        self._owner = _Owner(self)
        self._parameters: list[ReferenceType[Tensor]] = []
        # Set while a backward pass of the optimizer runs: returns the sum of a parameter, to which
        # operators may add, or None if they are to return the gradient to autograd.
        self.lookup: Callable[[Tensor], Tensor | None] | None = None
        finalize(self, _remove, self._parameters, self._owner)
        self.declare(parameters)

    def declare(self, parameters: Iterable[Tensor]) -> None:
        """Let these parameters know this object."""
        for parameter in parameters:
            if getattr(parameter, _OWNER, None) is not self._owner:
                vars(parameter)[_OWNER] = self._owner
                self._parameters.append(ref(parameter))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or unpickled optimizer makes another


def _remove(parameters: list[ReferenceType[Tensor]], owner: _Owner) -> None:
    for reference in parameters:
        parameter = reference()
        if parameter is not None and getattr(parameter, _OWNER, None) is owner:
            vars(parameter).pop(_OWNER, None)


def _main_grads_of(parameter: Tensor) -> MainGrads | None:
    """Return the `MainGrads` of a parameter; None if a hook has to see its gradient."""
    owner = getattr(parameter, _OWNER, None)
    if owner is None or not parameter.is_leaf or _has_hooks(parameter):
        return None
    main_grads: MainGrads | None = owner.reference()
    return main_grads


def _has_hooks(parameter: Tensor) -> bool:
    """Tell whether a parameter has hooks other than this package's own."""
    hooks = [hook for several in gradient_hooks(parameter) for hook in (several or {}).values()]
    return not all(str(getattr(hook, "__module__", "")).startswith("accumext.") for hook in hooks)


def may_fuse(parameter: Tensor) -> bool:
    """Tell whether an optimizer expects to offer a sum, and no hook has to see the gradient."""
    main_grads = _main_grads_of(parameter) if hasattr(parameter, _OWNER) else None
    holder = None if main_grads is None else main_grads.holder()
    return holder is not None and holder.expects_sum(parameter)


def destination(parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the sum to which a backward pass has to add a gradient of this dtype; None if it has
    to return the gradient to autograd."""
    main_grads = _main_grads_of(parameter) if hasattr(parameter, _OWNER) else None
    lookup = None if main_grads is None else main_grads.lookup
    main_grad = None if lookup is None else lookup(parameter)
    if main_grad is None or main_grad.dtype != dtype or not main_grad.is_contiguous():
        return None
    for see in observers:
        see(parameter, main_grad)
    return main_grad


def warn_nothing_to_clip(parameters: Iterable[Tensor]) -> None:
    """Have the optimizer of these parameters warn that none had a gradient in `.grad`."""
    for parameter in parameters:
        owner = getattr(parameter, _OWNER, None)
        main_grads = None if owner is None else owner.reference()
        holder = None if main_grads is None else main_grads.holder()
        if holder is not None:
            holder.nothing_to_clip()
            return
