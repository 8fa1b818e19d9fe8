"""The report of the last closed window: `AccumulatingOptimizer.last` and `stats()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from accumext.tensors.kinds import nonfinite
from accumext.tensors.scalars import Scalar, as_tensor, on_device

Name: TypeAlias = str | int  # an index, in the order of the groups, if there are no names


def named(names: list[Name]) -> str:
    """Return the text for these parameters in a message, with advice if they have no names."""
    text = ", ".join(map(str, names))
    if all(isinstance(name, str) for name in names):
        return text
    return f"parameters {text} (an optimizer made of model.named_parameters() knows their names)"


class WindowReport:
    """The last closed window. Tensors stay on their device until they are looked at.

    Attributes:
        total_norm: norm of the window's gradient before clipping (0-dim); NaN if it was not
            measured, with `on_nonfinite="step"` and without `max_norm` and a scaler.
        clip_coef: `min(1, max_norm / (total_norm + 1e-6))`, 1 without `max_norm` (0-dim).
        loss_scale: loss scale of the last micro-batch, 1 without a scaler (0-dim).
        weight: sum of the weights that entered the gradient (0-dim).
        micro_batches: how many micro-batches entered the gradient. Reads the device if bad ones
            are dropped.
        skipped: whether the optimizer step was left out. Reads the device.
        nonfinite: names of parameters with an inf or NaN gradient; of sharded ones, those whose
            shard on this process has one. Empty unless something was dropped. The names are those
            that the wrapped optimizer was made with, as in
            `torch.optim.AdamW(model.named_parameters())`. If it was made without names, as with
            `model.parameters()`, they are indices in that order. After a fused step on a GPU they
            are looked for in the gradients: read this before the gradients are cleared.
    """

    def __init__(
        self,
        skipped: Scalar,  # found_inf of the step
        total_norm: Scalar,
        clip_coef: Scalar,
        loss_scale: Scalar,
        weight: Scalar,
        micro_batches: Scalar | int,
        dtype: torch.dtype,  # of the norm
        device: torch.device,  # of the norm
        empty_if_skipped: bool = False,  # a skip has dropped the only micro-batch
    ) -> None:
        self._skipped, self._empty_if_skipped = skipped, empty_if_skipped
        self._total_norm, self._clip_coef, self._loss_scale = total_norm, clip_coef, loss_scale
        self._weight, self._micro_batches = weight, micro_batches
        self._dtype, self._device = dtype, device
        self._nonfinite: list[Name] = []
        # Gradients in which `nonfinite` looks, until they are cleared, and what gives their names.
        self.evidence: tuple[Sequence[Tensor], Callable[[Sequence[int]], list[Name]]] | None = None

    @property
    def total_norm(self) -> Tensor:
        return as_tensor(self._total_norm, self._dtype, self._device)

    @property
    def clip_coef(self) -> Tensor:
        return as_tensor(self._clip_coef, self._dtype, self._device)

    @property
    def loss_scale(self) -> Tensor:
        return as_tensor(self._loss_scale, torch.float64)

    @property
    def weight(self) -> Tensor:
        return as_tensor(self._kept(self._weight), torch.float64)

    @property
    def micro_batches(self) -> int:
        return int(self._kept(self._micro_batches))

    @property
    def skipped(self) -> bool:
        return bool(self._skipped)

    @property
    def known_to_be_skipped(self) -> bool:
        """True if the host knows already that the step was left out."""
        return not on_device(self._skipped) and bool(self._skipped)

    @property
    def nonfinite(self) -> list[Name]:
        if self.evidence is not None and self.skipped:
            grads, names_of = self.evidence
            self._nonfinite = names_of(nonfinite(grads))
        self.evidence = None
        return self._nonfinite

    def _kept(self, number: Scalar | int) -> Scalar | int:
        """Return the number, or 0 if the skipped window counts for nothing."""
        if not self._empty_if_skipped:
            return number
        return number * (1.0 - as_tensor(self._skipped, torch.float64))

    def name(self, culprits: list[Name]) -> None:
        """Record which parameters had an inf or NaN."""
        self._nonfinite = culprits

    def stats(self) -> dict[str, float]:
        """Return all numbers, read from the device at once."""
        values = {
            "total_norm": self.total_norm,
            "clip_coef": self.clip_coef,
            "loss_scale": self.loss_scale,
            "weight": self.weight,
            "micro_batches": self._kept(self._micro_batches),
            "skipped": self._skipped,
        }
        row = [as_tensor(value, torch.float64, self._device) for value in values.values()]
        return dict(zip(values, torch.stack(row).tolist(), strict=True))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value:g}" for name, value in self.stats().items())
        return f"WindowReport({fields}, nonfinite=[{named(self.nonfinite)}])"
