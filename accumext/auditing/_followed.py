"""The optimizers that an audit follows, and what is around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from accumext import AccumulatingOptimizer
from accumext.auditing._events import Optimized, Sketch
from accumext.auditing._passes import Parameters, Sketches


def shells(wrapper: Any) -> Iterator[Any]:
    """A wrapper, such as those of accumext, Accelerate and Lightning, and what it is around."""
    yield wrapper
    while hasattr(getattr(wrapper, "optimizer", None), "param_groups"):
        wrapper = wrapper.optimizer
        yield wrapper


def unwrapped(wrapper: Any) -> Any:
    """The optimizer inside of wrappers."""
    *_, inner = shells(wrapper)
    return inner


def ours_in(wrapper: Any) -> AccumulatingOptimizer | None:
    """The AccumulatingOptimizer among wrappers."""
    ours = (shell for shell in shells(wrapper) if isinstance(shell, AccumulatingOptimizer))
    return next(ours, None)


def parameters_of(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [tensor for group in groups for tensor in group["params"]]


class Used:
    """The gradients that a step finds, and what a fused optimizer does to them."""

    def __init__(self, left: Sketches, stepping: Any) -> None:
        self.left = left
        values = (getattr(stepping, name, None) for name in ("grad_scale", "found_inf"))
        self._scale, self._skip = (v.clone() if isinstance(v, Tensor) else v for v in values)

    def skipped(self) -> bool:
        return self._skip is not None and float(self._skip) > 0

    def gradient(self, size: int) -> Sketch | None:
        """With rows for so many parameters; None if it was not used."""
        scale = 1.0 if self._scale is None else float(self._scale)
        return None if self.skipped() else self.left.on_host(size) / scale


class Followed:
    """An optimizer whose steps are observed, in wrappers or not."""

    def __init__(self, wrapper: Any, number: int) -> None:
        self.optimizer, self.number = unwrapped(wrapper), number
        self.wrapper: AccumulatingOptimizer | None = None
        self.windows, self.closures = 0, 0
        self.filled = False  # whether a pass has left gradients since they were cleared
        self.used: Used | None = None  # by the last step, until it is written
        self._report: Any = None
        self._clip: list[Callable[[], float]] = []  # of the window, once the wrapper knows it
        self.wrap(ours_in(wrapper))

    def wrap(self, wrapper: AccumulatingOptimizer | None) -> None:
        """The wrapper is known, too."""
        if wrapper is not None and self.wrapper is None:
            self.wrapper, self._report = wrapper, wrapper.last

    def tensors(self) -> list[Tensor]:
        return parameters_of(self.optimizer.param_groups)

    def reported(self) -> bool:
        """Whether the wrapper has completed a window since `take_report`."""
        return self.wrapper is not None and self.wrapper.last not in (None, self._report)

    def take_report(self) -> None:
        """Its clip is that of the window."""
        assert self.wrapper is not None
        report = self._report = self.wrapper.last
        assert report is not None
        self._clip.append(lambda: float(report.clip_coef))

    def begin(self) -> Callable[[], float]:
        """A window: what returns its clip in the end."""
        clip = self._clip = []
        return lambda: clip[0]() if clip else 1.0

    def facts(self, known: Parameters) -> Optimized:
        decayed = []
        for group in self.optimizer.param_groups:
            if group.get("weight_decay") and any(t.dim() > 1 for t in group["params"]):
                decayed += [known.number(t) for t in group["params"] if t.dim() < 2]
        return Optimized(
            name=type(self.optimizer).__name__,
            parameters=known.among(self.tensors()) & known.trainable,
            wrapped=self.wrapper is not None,
            sums=self.wrapper is not None and self.wrapper.reduction == "sum",
            decayed=tuple(n for n in decayed if n is not None),
        )
