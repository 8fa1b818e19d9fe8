"""Loops over any model in little memory: `tbptt` and `rollout` over steps, `chunked_loss` over
slices of a batch."""

from accumext.loops._chunked_loss import chunked_loss as chunked_loss
from accumext.loops._rollout import RolloutOutput as RolloutOutput
from accumext.loops._rollout import rollout as rollout
from accumext.loops._tbptt import TBPTTResult as TBPTTResult
from accumext.loops._tbptt import tbptt as tbptt
