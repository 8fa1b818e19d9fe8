"""The head and its loss in one call: PyTorch's, and the kernels of Liger and CCE if installed.

All take the outputs of several steps at once and keep a gradient of the whole weight per call. None
returns the token that a decoder feeds back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _peers
import torch
import torch.nn.functional as F
from _peers import installed
from torch import Tensor

HeadLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(hidden [N, H], weight [V, H], bias [V], targets [N]) -> the summed loss, 0-dim"""

TORCH = "F.linear_cross_entropy"
TORCH_CHUNK = f"{TORCH}, chunk by hand"
LIGER, CCE = "Liger", "CCE"
_MODULES = {LIGER: "liger_kernel.transformers", CCE: "cut_cross_entropy"}


_PEERS = {name: installed(module) for name, module in _MODULES.items()}
_IN_TORCH = hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def status() -> dict[str, str]:
    in_torch = "in this torch" if _IN_TORCH else "not in this torch"
    return {TORCH: in_torch} | _peers.status(_MODULES)


def head_losses(device: torch.device, dtype: torch.dtype, rows: int) -> dict[str, HeadLoss]:
    """Return losses by peer, for calls of `rows` rows; CCE's kernels take half precision alone."""
    found: dict[str, HeadLoss] = {}
    if _IN_TORCH:
        found[TORCH] = _torch(torch.nn.LinearCrossEntropyOptions())
        found[TORCH_CHUNK] = _torch(torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows))
    if device.type == "cuda":
        if _PEERS[LIGER] is not None:
            found[LIGER] = _liger
        if _PEERS[CCE] is not None and dtype != torch.float32:
            found[CCE] = _cce
    return found


def _torch(options: Any) -> HeadLoss:
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        return F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="sum", options=options
        )

    return loss


def _liger(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    peer = _PEERS[LIGER].LigerFusedLinearCrossEntropyLoss(reduction="sum")
    loss: Tensor = peer(weight, hidden, targets, bias)
    return loss


def _cce(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    peer = _PEERS[CCE].linear_cross_entropy
    loss: Tensor = peer(hidden, weight, targets, bias=bias, reduction="sum")
    return loss
