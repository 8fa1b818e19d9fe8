"""Gradient accumulation and truncated backpropagation through time, without the memory traffic."""

from accumext import _native, ops  # noqa: F401  (ops defines the schemas that the libraries implement)
from accumext._clip import clip_grad_norm_ as clip_grad_norm_
from accumext._native import backend as backend
from accumext._native import backend_reason as backend_reason
from accumext.chunked import chunked_loss as chunked_loss
from accumext.decoder import DecodeOutput as DecodeOutput
from accumext.decoder import decode_loss as decode_loss
from accumext.decoder import decode_memory as decode_memory
from accumext.ops import accumulate_ as accumulate_
from accumext.ops import scale_ as scale_
from accumext.ops import total_norm as total_norm
from accumext.ops import unscale_check_clip_accumulate_ as unscale_check_clip_accumulate_
from accumext.optimizer import AccumulatingOptimizer as AccumulatingOptimizer
from accumext.tbptt import TBPTTResult as TBPTTResult
from accumext.tbptt import tbptt as tbptt

__version__ = "0.1.0"

_native.load_installed()
