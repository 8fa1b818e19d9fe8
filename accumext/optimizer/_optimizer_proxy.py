"""An optimizer around an optimizer that owns nothing an optimizer owns."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_params_of = itemgetter("params")
_TRANSIENT = ("step", "grad_scale", "found_inf")  # set by schedulers and by GradScaler.step


def _forwarded(name: str) -> Any:
    """A property that is the wrapped optimizer's attribute, also where that is rebound."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        doc=f"`{name}` of the wrapped optimizer.",
    )


class OptimizerWrapper(Optimizer):
    """A true `torch.optim.Optimizer` with the groups, state, defaults and hooks of another.

    References to them would go stale: `load_state_dict` rebinds them. `Optimizer.__init__` and
    `Optimizer.__setstate__` are never called, as both would make a second set.
    """

    optimizer: Optimizer

    param_groups = _forwarded("param_groups")
    state = _forwarded("state")
    defaults = _forwarded("defaults")
    _optimizer_step_pre_hooks = _forwarded("_optimizer_step_pre_hooks")
    _optimizer_step_post_hooks = _forwarded("_optimizer_step_post_hooks")
    _optimizer_state_dict_pre_hooks = _forwarded("_optimizer_state_dict_pre_hooks")
    _optimizer_state_dict_post_hooks = _forwarded("_optimizer_state_dict_post_hooks")
    _optimizer_load_state_dict_pre_hooks = _forwarded("_optimizer_load_state_dict_pre_hooks")
    _optimizer_load_state_dict_post_hooks = _forwarded("_optimizer_load_state_dict_post_hooks")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):  # not there yet while unpickling
            raise AttributeError(name)
        try:
            return getattr(self.optimizer, name)
        except AttributeError:
            mine, theirs = type(self).__name__, type(self.optimizer).__name__
            raise AttributeError(f"neither {mine} nor {theirs} has {name!r}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        """Exactly the wrapped optimizer's, so that checkpoints move both ways."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of the wrapped optimizer, from with or without this wrapper."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(map(_params_of, self.optimizer.param_groups)))

    def _names(self) -> dict[Tensor, str | int]:
        """Names of the parameters where the optimizer was given any, else their indices."""
        names: list[str | int] = []
        for group in self.optimizer.param_groups:
            names += group.get("param_names", range(len(names), len(names) + len(group["params"])))
        return dict(zip(self._parameters(), names, strict=True))

    def _is_priming(self) -> bool:
        """Whether a distributed checkpoint steps only to make the optimizer create its state.

        There is no state yet, and every learning rate and gradient is zero. Gradients are read only
        where the rest holds.
        """
        if self.optimizer.state:
            return False
        for group in self.optimizer.param_groups:
            rate = group.get("lr", 0.0)
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                return False
            if rate != 0:
                return False
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        return bool(grads) and not any(bool(torch.any(grad != 0)) for grad in grads)
