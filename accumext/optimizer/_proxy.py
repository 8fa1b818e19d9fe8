"""An optimizer around another, whose groups, state, defaults and hooks it uses."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from torch.optim import Optimizer

from accumext.tensors.torch_private import HOOK_ATTRIBUTES

# Attributes that GradScaler and learning-rate schedulers set on an optimizer; not copied.
_TRANSIENT = ("step", "grad_scale", "found_inf")


def _forwarded(name: str) -> Any:
    """Return a property for an attribute of the wrapped optimizer, also after it is rebound."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        doc=f"`{name}` of the wrapped optimizer.",
    )


def takes(method: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the arguments if a method takes them by name, else none: `zero_grad` of apex and of
    fairscale takes no `set_to_none`."""
    try:
        inspect.signature(method).bind(**arguments)
    except (TypeError, ValueError):  # it does not take them, or has no signature
        return {}
    return arguments


class OptimizerProxy(Optimizer, ABC):
    """A true `torch.optim.Optimizer` with the groups, state, defaults and hooks of another.

    These are properties, since references would go stale when `load_state_dict` rebinds them.
    `Optimizer.__init__` and `Optimizer.__setstate__` are never called, as both would create a
    second set of groups, state and hooks.
    """

    optimizer: Optimizer

    param_groups = _forwarded("param_groups")
    state = _forwarded("state")
    defaults = _forwarded("defaults")

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step in the way of this kind of proxy."""

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):  # `optimizer` is not set while unpickling
            raise AttributeError(name)
        try:
            return getattr(self.optimizer, name)
        except AttributeError:
            raise self._has_no(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        mine = name.startswith("_") or name == "optimizer" or name in _TRANSIENT
        if mine or hasattr(type(self), name) or name in vars(self):
            super().__setattr__(name, value)
        elif hasattr(self.optimizer, name):
            setattr(self.optimizer, name, value)
        else:
            known = [n for n in (*dir(type(self)), *dir(self.optimizer)) if not n.startswith("_")]
            near = get_close_matches(name, known, n=1)
            raise self._has_no(name, f"; did you mean {near[0]!r}?" if near else "")

    def _has_no(self, name: str, advice: str = "") -> AttributeError:
        kinds = f"neither {type(self).__name__} nor {type(self.optimizer).__name__}"
        return AttributeError(f"{kinds} has {name!r}{advice}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


for _name in HOOK_ATTRIBUTES:
    setattr(OptimizerProxy, _name, _forwarded(_name))
