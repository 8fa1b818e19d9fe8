"""The end of a window, in torch's own loop and in the optimizer's, for tests that count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from accumext.optimizer._accumulating_optimizer import AccumulatingOptimizer

Optimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

MAX_NORM = 0.1
WARM_UP = 2  # steps until the optimizer has its state

OPTIMIZERS: dict[str, Optimizer] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
}


@dataclass(frozen=True)
class Boundaries:
    """Both loops with one optimizer, on one device."""

    optimizer: str
    scaled: bool
    clipped: bool
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def _parameters(self) -> list[nn.Parameter]:
        where = {"dtype": self.dtype, "device": self.device}
        return [nn.Parameter(torch.randn(4, 3, **where)) for _ in range(3)]

    def _scaler(self) -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler(self.device, init_scale=8.0) if self.scaled else None

    def stock(self, count: Callable[[Callable[[], object]], Any]) -> Any:
        """Return what `count` says of all that torch's loop does after a backward pass."""
        parameters, scaler = self._parameters(), self._scaler()
        opt = OPTIMIZERS[self.optimizer](parameters)

        def boundary() -> None:
            if self.clipped:
                if scaler is not None:
                    scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            if scaler is None:
                opt.step()
            else:
                scaler.step(opt)
                scaler.update()
            opt.zero_grad()

        for _ in range(WARM_UP + 1):
            loss = _loss_of(parameters)
            (loss if scaler is None else scaler.scale(loss)).backward()
            result = count(boundary)
        return result

    def ours(
        self,
        count: Callable[[Callable[[], object]], Any],
        window: int,
        weight: float | Tensor = 1.0,
        **options: Any,
    ) -> Any:
        """Return what `count` says of the step that closes a window."""
        parameters, scaler = self._parameters(), self._scaler()
        options |= {"scaler": scaler, "max_norm": MAX_NORM if self.clipped else None}
        wrapped = OPTIMIZERS[self.optimizer](parameters)
        opt = AccumulatingOptimizer(wrapped, window=window, **options)
        for _ in range((WARM_UP + 1) * window):
            opt.backward(_loss_of(parameters), weight)
            result = count(opt.step)
        assert opt.stepped
        assert not opt.last.skipped
        assert (opt.last.clip_coef < 1.0) == self.clipped
        return result


def _loss_of(parameters: list[nn.Parameter]) -> Tensor:
    return torch.stack([(p * p).sum() for p in parameters]).sum()
