"""Gradient accumulation and truncated backpropagation through time, without the memory traffic."""

import signal as _signal
import sys as _sys

# `python -m accumext` imports torch from here, before a line of its own, and that takes seconds.
# Until accumext/__main__.py has it, Ctrl-C ends the process at once instead of with a traceback.
# While Python looks for what `-m` names, sys.argv[0] is "-m"; other programs keep what they have.
if (
    _sys.argv[:1] == ["-m"]
    and _sys.orig_argv[-len(_sys.argv) :][:1] == ["accumext"]
    and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
):
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from accumext import ops
from accumext._clip_grad_norm import clip_grad_norm_
from accumext.audit import Audit, Finding, audit
from accumext.backend import _libraries, backend, backend_reason
from accumext.chunked import chunked_loss
from accumext.decoder import DecodeOutput, decode_loss, decode_memory
from accumext.generation import GenerateOutput, generate
from accumext.masters import masters
from accumext.ops import (
    accumulate_,
    copy_rounded_,
    scale_,
    total_norm,
    unscale_check_clip_accumulate_,
)
from accumext.optimizer import AccumulatingOptimizer, WindowReport
from accumext.rollout import RolloutOutput, rollout
from accumext.sharding import window_memory
from accumext.tbptt import TBPTTResult, tbptt

__version__ = "0.1.0"

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


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_libraries.load_installed()  # after ops, which defines what the libraries implement
