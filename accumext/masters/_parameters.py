"""What an optimizer steps on: the model's parameters themselves, or masters of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from accumext import _checks
from accumext._scalars import Scalar

params_of = itemgetter("params")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Of all groups, in order."""
    return list(chain.from_iterable(map(params_of, optimizer.param_groups)))


class Parameters:
    """What an optimizer steps on where that is the model's parameters themselves.

    Gradients are formed for `parameters()`, and lent to `stepped_on()`, which are as many, in the
    same order. `MasterWeights` is the same for masters.
    """

    is_parameters = True  # whether the two are the same

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def parameters(self) -> list[Tensor]:
        """What gradients are formed for."""
        return parameters_of(self._optimizer)

    def stepped_on(self) -> list[Tensor]:
        """What the optimizer holds."""
        return parameters_of(self._optimizer)

    def goes_to_host(self) -> list[bool]:
        """Of which parameters gradients leave their device, for sums on the host; [] of none."""
        return []

    def send(self, grads: list[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        """Begin to bring gradients of all parameters to where their sums are; what is returned
        waits for them."""
        return lambda: grads

    def take_over(self) -> None:
        """Look whether others have written the parameters."""

    def rounding(self, skip: Scalar = 0.0, *, every: bool = False) -> None:
        """What writes the parameters of which a gradient was lent, or every one, unless `skip`."""

    def lend_grads(self) -> None:
        """Give what is stepped on the parameters' gradients as they are now."""

    def take_grads_back(self) -> None:
        """Undo that."""

    def followed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the optimizer, after which parameters are what it has made of its own."""
        return method

    def check_added(self, op: str, given: Sequence[Tensor]) -> None:
        """Raise for parameters that cannot be added to the optimizer."""
        if any(getattr(tensor, "master_of", None) is not None for tensor in given):
            contract = "hold masters only where the optimizer was made with some"
            advice = "Pass AccumulatingOptimizer(..., masters=...)"
            _checks.fail_value(op, "params", contract, "a master", advice)

    def know(self) -> None:
        """Look again: parameters were added to the optimizer."""

    def state_dict(self, packed: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state dict with what is to be saved beside it."""
        return packed

    def load_state_dict(
        self, op: str, packed: dict[str, Any], load: Callable[[dict[str, Any]], None]
    ) -> None:
        """Check, `load` into the optimizer, and load what was saved beside it."""
        load(packed)


def parameters_in(param_group: Any) -> list[Tensor]:
    """What is in a group that an optimizer is about to be given; it says itself what is wrong."""
    if not isinstance(param_group, dict):
        return []
    given = param_group.get("params", ())
    if not isinstance(given, (Tensor, list, tuple)) and isinstance(given, Iterable):
        given = param_group["params"] = list(given)  # an iterator can be read only once
    members = [given] if isinstance(given, Tensor) or not isinstance(given, Iterable) else given
    tensors = [m[1] if isinstance(m, tuple) and len(m) == 2 else m for m in members]
    return [t for t in tensors if isinstance(t, Tensor)]
