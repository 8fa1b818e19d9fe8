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

from accumext import ops as ops
from accumext._clip_grad_norm import clip_grad_norm_ as clip_grad_norm_
from accumext.backend import _libraries
from accumext.backend import backend as backend
from accumext.backend import backend_reason as backend_reason
from accumext.chunked import chunked_loss as chunked_loss
from accumext.decoder import DecodeOutput as DecodeOutput
from accumext.decoder import GenerateOutput as GenerateOutput
from accumext.decoder import decode_loss as decode_loss
from accumext.decoder import decode_memory as decode_memory
from accumext.decoder import generate as generate
from accumext.ops import accumulate_ as accumulate_
from accumext.ops import copy_rounded_ as copy_rounded_
from accumext.ops import scale_ as scale_
from accumext.ops import total_norm as total_norm
from accumext.ops import unscale_check_clip_accumulate_ as unscale_check_clip_accumulate_
from accumext.optimizer import AccumulatingOptimizer as AccumulatingOptimizer
from accumext.optimizer import WindowReport as WindowReport
from accumext.optimizer import masters as masters
from accumext.optimizer import window_memory as window_memory
from accumext.rollout import RolloutOutput as RolloutOutput
from accumext.rollout import rollout as rollout
from accumext.tbptt import TBPTTResult as TBPTTResult
from accumext.tbptt import tbptt as tbptt

__version__ = "0.1.0"

_libraries.load_installed()  # after ops, which defines what the libraries implement
