"""Gradient accumulation and truncated backpropagation through time, without the memory traffic."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accumext import ops
from accumext.backends import _libraries, backend, backend_reason
from accumext.decoder import DecodeOutput, decode_loss, decode_memory
from accumext.distributed import window_memory
from accumext.generation import GenerateOutput, generate
from accumext.loops import RolloutOutput, TBPTTResult, chunked_loss, rollout, tbptt
from accumext.master_weights import masters
from accumext.ops import (
    accumulate_,
    copy_rounded_,
    scale_,
    total_norm,
    unscale_check_clip_accumulate_,
)
from accumext.ops.clip_grad_norm import clip_grad_norm_
from accumext.optimizer import AccumulatingOptimizer, WindowReport

if TYPE_CHECKING:
    from accumext.auditing import Audit, Finding, audit

__version__ = "0.2.0"

__all__ = [
    "AccumulatingOptimizer",
    "Audit",
    "DecodeOutput",
    "Finding",
    "GenerateOutput",
    "RolloutOutput",
    "TBPTTResult",
    "WindowReport",
    "accumulate_",
    "audit",
    "backend",
    "backend_reason",
    "chunked_loss",
    "clip_grad_norm_",
    "copy_rounded_",
    "decode_loss",
    "decode_memory",
    "generate",
    "masters",
    "ops",
    "rollout",
    "scale_",
    "tbptt",
    "total_norm",
    "unscale_check_clip_accumulate_",
    "window_memory",
]


def __getattr__(name: str) -> Any:
    """The auditor, which is imported when it is asked for."""
    if name in ("Audit", "Finding", "audit"):
        return getattr(import_module("accumext.auditing"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_libraries.load_installed()  # after ops, which defines what the libraries implement
