"""What is remembered of the last closed window: `AccumulatingOptimizer.last` and `stats()`."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from accumext._gradients import Scalar, plain

Name: TypeAlias = str | int


class WindowReport:
    """The last closed window. Tensors stay on their device until they are looked at.

    Attributes:
        total_norm: norm of the window's gradient before clipping (0-dim).
        clip_coef: `min(1, max_norm / (total_norm + 1e-6))`, 1 without `max_norm` (0-dim).
        loss_scale: loss scale of the last micro-batch, 1 without a scaler (0-dim).
        weight: sum of the weights that entered the gradient (0-dim).
        micro_batches: how many micro-batches entered the gradient.
        skipped: whether the optimizer step was left out.
        nonfinite: parameters with an inf or NaN, where one was found.
    """

    def __init__(
        self,
        *,
        skipped: Tensor,  # [] found_inf of the step
        total_norm: Tensor,  # []
        clip_coef: Scalar,
        loss_scale: Scalar,
        weight: Scalar,
        micro_batches: int | Tensor,
        nonfinite: list[Name],
    ) -> None:
        self._skipped = skipped
        self.total_norm = total_norm
        self.clip_coef = _tensor(clip_coef).to(total_norm.dtype)
        self.loss_scale = _tensor(loss_scale)
        self.weight = _tensor(weight)
        self._micro_batches = micro_batches
        self._nonfinite = nonfinite
        self._evidence: dict[Name, Tensor] = {}

    @property
    def skipped(self) -> bool:
        """Whether the optimizer step was left out. Reads the device."""
        return bool(self._skipped)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches entered the gradient. Reads the device if bad ones are dropped."""
        return int(self._micro_batches)

    @property
    def nonfinite(self) -> list[Name]:
        """Names (indices, if the optimizer has no names) of parameters with an inf or NaN gradient.

        Empty unless something was dropped. After a fused step on a GPU the host does not know yet:
        ask before the gradients are cleared.
        """
        if self._evidence and self.skipped:
            self._nonfinite = [
                name for name, grad in self._evidence.items() if not plain(grad).isfinite().all()
            ]
        self.forget()
        return self._nonfinite

    def keep(self, evidence: dict[Name, Tensor]) -> None:
        """Hold on to the gradients until someone asks, or they are cleared."""
        self._evidence = evidence

    def forget(self) -> None:
        """Let go of the gradients."""
        self._evidence = {}

    def stats(self) -> dict[str, float]:
        """Everything that is a number, read from the device at once."""
        values = {
            "total_norm": self.total_norm,
            "clip_coef": self.clip_coef,
            "loss_scale": self.loss_scale,
            "weight": self.weight,
            "micro_batches": _tensor(self._micro_batches),
            "skipped": self._skipped,
        }
        device = self.total_norm.device
        row = torch.stack([value.to(device, torch.float64) for value in values.values()])
        return dict(zip(values, row.tolist(), strict=True))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value:g}" for name, value in self.stats().items())
        return f"WindowReport({fields}, nonfinite={self.nonfinite})"


def _tensor(value: Scalar | int) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
