"""The optimizers that an audit follows, and the wrappers around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from accumext import AccumulatingOptimizer
from accumext.auditing._events import Optimized, Sketch
from accumext.auditing._passes import Parameters
from accumext.auditing._sketch import Sketches


def shells(wrapper: Any) -> Iterator[Any]:
    """Yield a wrapper, such as accumext's, Accelerate's or Lightning's, and what it wraps."""
    yield wrapper
    while hasattr(getattr(wrapper, "optimizer", None), "param_groups"):
        wrapper = wrapper.optimizer
        yield wrapper


def unwrapped(wrapper: Any) -> Any:
    """Return the optimizer inside of wrappers."""
    *_, inner = shells(wrapper)
    return inner


def ours_in(wrapper: Any) -> AccumulatingOptimizer | None:
    """Return the AccumulatingOptimizer among wrappers; None if there is none."""
    ours = (shell for shell in shells(wrapper) if isinstance(shell, AccumulatingOptimizer))
    return next(ours, None)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer steps on; none if it is not fully constructed."""
    groups = getattr(optimizer, "param_groups", [])
    return [tensor for group in groups for tensor in group["params"]]


class Used:
    """The gradients that a step begins with, and how a fused optimizer scales or skips them."""

    def __init__(self, left: Sketches, stepping: Any) -> None:
        self.left = left
        values = (getattr(stepping, name, None) for name in ("grad_scale", "found_inf"))
        self._scale, self._skip = (v.clone() if isinstance(v, Tensor) else v for v in values)

    def gradient(self, size: int) -> Sketch | None:
        """Return the gradient in `size` rows, one per parameter; None if the step was skipped."""
        skipped = self._skip is not None and float(self._skip) > 0
        scale = 1.0 if self._scale is None else float(self._scale)
        return None if skipped else self.left.on_host(size) / scale


class Followed:
    """An optimizer whose steps are observed, in wrappers or not."""

    def __init__(self, optimizer: Any, number: int) -> None:
        self.optimizer, self.number = optimizer, number
        self.wrapper: AccumulatingOptimizer | None = None
        self.windows, self.closures = 0, 0
        self.filled = False  # whether a pass has left gradients since they were cleared
        self.used: Used | None = None  # by the last step, if its window is not complete
        self._reports: dict[int, Any] = {}  # the wrapper's reports, by window
        self._last: Any = None  # the last report, also if it came before the audit

    def wrap(self, wrapper: AccumulatingOptimizer | None) -> None:
        """Note the wrapper around the optimizer, unless one is known."""
        if wrapper is not None and self.wrapper is None:
            self.wrapper, self._last = wrapper, wrapper.last

    def tensors(self) -> list[Tensor]:
        return parameters_of(self.optimizer)

    def take_report(self) -> bool:
        """Tell whether the wrapper has completed the window; keep its report, with the clip."""
        if self.wrapper is None or self.wrapper.last in (None, self._last):
            return False
        self._last = self._reports[self.windows] = self.wrapper.last
        return True

    def clip_of(self, window: int) -> float:
        """Return the clip coefficient with which the wrapper multiplied the sum of a window."""
        return float(self._reports[window].clip_coef) if window in self._reports else 1.0

    def facts(self, known: Parameters) -> Optimized:
        decayed = []
        for group in self.optimizer.param_groups:
            if group.get("weight_decay") and any(t.dim() > 1 for t in group["params"]):
                decayed += [known.number(t) for t in group["params"] if t.dim() < 2]
        own = known.among(self.tensors())
        return Optimized(
            name=type(self.optimizer).__name__,
            parameters=own & known.trainable,
            frozen=len(own - known.trainable),
            wrapped=self.wrapper is not None,
            sums=self.wrapper is not None and self.wrapper.reduction == "sum",
            decayed=tuple(n for n in decayed if n is not None),
        )
