"""Peers, if they are installed: kernels of NVIDIA apex and TransformerEngine, and Accelerate's
loop."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_CHUNK = 65536  # elements; what both libraries' own callers pass
_MODULES = {"apex": "amp_C", "TransformerEngine": "transformer_engine.pytorch.optimizers"}


@functools.cache
def installed(module: str) -> Any | None:
    """Return a module; None if it is not installed, or wants a GPU, as Triton does."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return None


def status(modules: Mapping[str, str] | None = None) -> dict[str, str]:
    """Say which peers are installed, by their modules."""
    modules = {**_MODULES, "Accelerate": "accelerate"} if modules is None else modules
    return {n: "installed" if installed(m) else "not installed" for n, m in modules.items()}


def norms(grads: Sequence[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Return by peer what finds the 2-norm of gradients of one dtype."""
    flag = _flag(grads)
    return {
        name: lambda peer=peer: peer.multi_tensor_l2norm(_CHUNK, flag, [grads], False)[0]
        for name, peer in _on_gpu(grads).items()
    }


def unscaled_norms(grads: Sequence[Tensor], inv_scale: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return by peer what finds the 2-norm of `grads * inv_scale`; nothing is checked."""
    flag = _flag(grads)
    return {
        name: lambda peer=peer: peer.multi_tensor_unscale_l2norm(
            _CHUNK, flag, [grads], inv_scale, False
        )[0]
        for name, peer in _on_gpu(grads).items()
    }


def clips(grads: Sequence[Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Return apex's clip_grad_norm_, which reads the norm from the device. Others have none."""
    if "apex" not in _on_gpu(grads):
        return {}
    return {"apex": importlib.import_module("apex.contrib.clip_grad").clip_grad_norm_}


def accumulations(
    main_grads: Sequence[Tensor], grads: Sequence[Tensor], inv_scale: float
) -> dict[str, Callable[[], Tensor]]:
    """Return by peer what checks, adds `grad * inv_scale` and finds the norm of the sums.

    apex alone has such a kernel, and not for bfloat16.
    """
    peers = _on_gpu(grads)
    if "apex" not in peers or grads[0].dtype == torch.bfloat16:
        return {}
    flag, apex = _flag(grads), peers["apex"]

    def run() -> Tensor:
        lists = [grads, main_grads, main_grads]
        apex.multi_tensor_axpby(_CHUNK, flag, lists, inv_scale, 1.0, 0)
        return apex.multi_tensor_l2norm(_CHUNK, flag, [main_grads], False)[0]

    return {"apex": run}


def _on_gpu(grads: Sequence[Tensor]) -> dict[str, Any]:
    peers = {name: installed(module) for name, module in _MODULES.items() if grads[0].is_cuda}
    return {name: peer for name, peer in peers.items() if peer is not None}


def _flag(grads: Sequence[Tensor]) -> Tensor:
    """Make the flag that kernels set if they find an inf or NaN; if set, they do nothing."""
    return torch.zeros(1, dtype=torch.int32, device=grads[0].device)
