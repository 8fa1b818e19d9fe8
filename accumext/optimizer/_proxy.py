"""An optimizer around an optimizer that owns nothing an optimizer owns; and trainers around it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from torch.optim import Optimizer

from accumext import _checks
from accumext._torch_private import HOOK_ATTRIBUTES

# Attributes that GradScaler and learning-rate schedulers set on an optimizer; no part of a copy.
_TRANSIENT = ("step", "grad_scale", "found_inf")


def _forwarded(name: str) -> Any:
    """A property that is the wrapped optimizer's attribute, also where that is rebound."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        doc=f"`{name}` of the wrapped optimizer.",
    )


class OptimizerProxy(Optimizer, ABC):
    """A true `torch.optim.Optimizer` with the groups, state, defaults and hooks of another.

    References to them would go stale: `load_state_dict` rebinds them. `Optimizer.__init__` and
    `Optimizer.__setstate__` are never called, as both would make a second set.
    """

    optimizer: Optimizer

    param_groups = _forwarded("param_groups")
    state = _forwarded("state")
    defaults = _forwarded("defaults")
    vars().update((name, _forwarded(name)) for name in HOOK_ATTRIBUTES)

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, in whatever way the proxy is for."""

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):  # not there yet while unpickling
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


def refuse_second_accumulation(op: str, window: int) -> None:
    """RuntimeError where Accelerate leaves out steps itself: the two windows would multiply.

    Its state is one per process, and says nothing before Accelerate is imported. Other trainers
    keep theirs to themselves: several backward passes before a step may be a micro-batch.
    """
    state = sys.modules.get("accelerate.state")
    steps = 1 if window == 1 or state is None else state.GradientState().num_steps
    if steps > 1:
        got = f"window={window} and gradient_accumulation_steps={steps}"
        advice = "Pass gradient_accumulation_steps=1 to Accelerator, or window=1 to the optimizer"
        contract = "be 1 where Accelerate accumulates too"
        raise RuntimeError(_checks.message(op, "window", contract, got, advice))


def tell_of_a_skipped_step(optimizer: object) -> None:
    """Have Accelerate know, under a GradScaler, that no step was taken: its schedules wait then.

    It takes a call of `step` for a step taken, and wraps `step` for that while the scaler runs.
    """
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())
    for cell in getattr(vars(optimizer).get("step"), "__closure__", None) or ():
        with suppress(ValueError):  # a variable of the closure that is not set
            if isinstance(cell.cell_contents, wrapper):
                cell.cell_contents._accelerate_step_called = False
